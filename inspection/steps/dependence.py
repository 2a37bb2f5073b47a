"""What an output depends on: the causal mask hides the future, and without positions the order of a text is invisible.

Dimension letters: L length, E width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...configuration.seeds import require_seed
from ...modeling.positions import LearnedPositions, SinusoidalPositions
from ..maps.eager_mode import evaluating

_POSITIONS = (LearnedPositions, SinusoidalPositions)


def position_gradients(model: PreTrainedModel, inputs: Mapping[str, Tensor], seed: int = 0) -> Tensor:
    """How the output at each position changes with the input at each position.

    Args:
        model: any model of the package; of an encoder-decoder the decoder is looked at, of others the whole.
        inputs: its keyword arguments for one text, as its tokenizer gives them; an encoder-decoder's with
            `decoder_input_ids`.
        seed: of the direction in which an output is looked at.

    Returns:
        (L, L): at row t and column s the largest gradient, without its sign, of the output at t with respect to the
        embedding of the token at s. Exactly 0 where the output does not depend on that token.

    Raises:
        ValueError: if the inputs hold no ids, or several texts.
    """
    is_encoder_decoder = model.config.is_encoder_decoder
    name = "decoder_input_ids" if is_encoder_decoder else "input_ids"
    ids = inputs.get(name)
    if ids is None or len(ids) != 1:
        raise ValueError(f"`inputs` must hold the `{name}` of one text")
    network: Any = model if is_encoder_decoder else model.base_model
    embed = (network.get_decoder() if is_encoder_decoder else network).get_input_embeddings()
    embedded = embed(ids).detach().requires_grad_()
    given = {key: value for key, value in inputs.items() if key != name}
    given[name.replace("input_ids", "inputs_embeds")] = embedded
    with torch.enable_grad(), evaluating(model):
        states = _states_of(network(**given, return_dict=True))  # (L, width)
        # The sum over a normalised vector is always the same, so that its gradient says nothing: any other direction.
        direction = torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(seed)).to(states)
        rows = [torch.autograd.grad(state @ direction, embedded, retain_graph=True)[0] for state in states]
    return torch.stack([row[0].abs().amax(dim=-1) for row in rows])  # (L, L)


def _states_of(outputs: Any) -> Tensor:
    """What a model gives for each token of one text; the model inside an adapter may have an output layer."""
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[0]


@contextmanager
def without_positions(model: nn.Module) -> Iterator[None]:
    """Sets a model's position embeddings to zero, and back to what they were.

    Raises:
        ValueError: if it has none.
    """
    tables = [
        module.weight if isinstance(module, LearnedPositions) else module.table
        for module in model.modules()
        if isinstance(module, _POSITIONS)
    ]
    if not tables:
        raise ValueError(f"`model` is a {type(model).__name__}, which has no position embeddings")
    kept = [table.detach().clone() for table in tables]
    try:
        with torch.no_grad():
            for table in tables:
                table.zero_()
        yield
    finally:
        with torch.no_grad():
            for table, values in zip(tables, kept, strict=True):
                table.copy_(values)


@dataclass(frozen=True)
class OrderEffect:
    """What permuting the input of a model does to its output.

    Attributes:
        permutation: place i of the permuted text holds the token that was at `permutation[i]`.
        with_positions: the largest difference between the output of the permuted text and the permuted output.
        without_positions: the same, with position embeddings of zero.
        largest: the largest output, without its sign, that these are to be compared with.
    """

    permutation: tuple[int, ...]
    with_positions: float
    without_positions: float
    largest: float


@torch.no_grad()
def order_effect(model: PreTrainedModel, input_ids: Tensor, seed: int = 0) -> OrderEffect:
    """Permutes a text, and compares the output with the permuted output, with position embeddings and without.

    In an encoder without positions the two are equal but for rounding: it takes a text for a bag of words. Under a
    causal mask they are not, since a token then sees as many others as stand before it.

    Args:
        model: any model of the package with position embeddings; of an encoder-decoder the encoder is looked at.
        input_ids: of one text, (1, L).
        seed: of the permutation, which is drawn anew while it leaves the text as it is.

    Raises:
        ValueError: if the model has no position embeddings, the text has less than two different tokens, or the seed
            is none.
    """
    require_seed(seed)
    if input_ids.shape[0] != 1 or len(input_ids.unique()) < 2:
        raise ValueError("`input_ids` must hold one text with two different tokens or more")
    network: Any = model.base_model
    if model.config.is_encoder_decoder:
        network = model.get_encoder()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(input_ids.shape[1], generator=generator)
    while torch.equal(input_ids[:, order], input_ids):
        order = torch.randperm(input_ids.shape[1], generator=generator)

    def states(ids: Tensor) -> Tensor:
        # Of one segment, said so: a BERT would warn of separators otherwise, which are permuted like the rest.
        segments = {"token_type_ids": torch.zeros_like(ids)} if hasattr(model.config, "type_vocab_size") else {}
        return _states_of(network(input_ids=ids, **segments, return_dict=True))

    def difference() -> float:
        return float((states(input_ids[:, order]) - states(input_ids)[order]).abs().max())

    with evaluating(model):
        with without_positions(network):
            without = difference()
        return OrderEffect(tuple(order.tolist()), difference(), without, float(states(input_ids).abs().max()))
