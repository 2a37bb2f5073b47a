"""Which inputs an output depends on, as measured: a causal mask hides later tokens, and positions tell the order.

Dimension letters: L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...families.seeds import require_seed
from ...modeling.positions import LearnedPositions, SinusoidalPositions
from ..maps.eager_mode import evaluation_mode

_POSITIONS = (LearnedPositions, SinusoidalPositions)


def position_gradients(model: PreTrainedModel, inputs: Mapping[str, Tensor], seed: int = 0) -> Tensor:
    """Measures how the output at each position changes with the input embedding at each position.

    Args:
        model: any model of the package. In an encoder-decoder the outputs and embeddings are those of the decoder.
        inputs: keyword arguments of the model for one text, as its tokenizer returns them; for an encoder-decoder with
            `decoder_input_ids`.
        seed: seed of the random direction onto which the output vectors are projected before the gradient is taken.

    Returns:
        (L, L): in row t and column s the largest absolute gradient of the output at t with respect to the embedding of
        the token at s. It is exactly 0 if the output does not depend on that token.

    Raises:
        ValueError: if the inputs do not hold the ids of exactly one text.
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
    with evaluation_mode(model), torch.enable_grad():
        states = _output_vectors(network(**given, return_dict=True))  # (L, width)
        # A random direction, because the sum over a layer-normalised vector is constant and its gradient is 0.
        direction = torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(seed)).to(states)
        rows = [torch.autograd.grad(state @ direction, embedded, retain_graph=True)[0] for state in states]
    return torch.stack([row[0].abs().amax(dim=-1) for row in rows])  # (L, L)


def _output_vectors(outputs: Any) -> Tensor:
    """Returns the logits of a model for each token of one text, or its hidden states if it has no output layer."""
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[0]


@contextmanager
def without_positions(model: nn.Module) -> Iterator[None]:
    """Sets the position embeddings of a model to zero while a block runs, and restores them afterwards.

    Raises:
        ValueError: if the model has no position embeddings.
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
    """The effect of permuting the input of a model on its output.

    Attributes:
        permutation: position i of the permuted text holds the token that was at position `permutation[i]`.
        with_positions: the largest difference between the output for the permuted text and the permuted output.
        without_positions: the same difference with position embeddings of zero.
        largest: the largest absolute output, as the scale of the two differences.
    """

    permutation: tuple[int, ...]
    with_positions: float
    without_positions: float
    largest: float


def order_effect(model: PreTrainedModel, input_ids: Tensor, seed: int = 0) -> OrderEffect:
    """Permutes a text, and compares the new output with the permuted old one, with and without position embeddings.

    In an encoder without positions the two are equal up to rounding: it treats a text as a bag of words. Under a
    causal mask they differ, because a token then attends to as many tokens as precede it.

    Args:
        model: any model of the package with position embeddings; in an encoder-decoder the encoder is measured.
        input_ids: the ids of one text, (1, L).
        seed: seed of the permutation, which is redrawn as long as it leaves the text unchanged.

    Raises:
        ValueError: if the model has no position embeddings, the text has fewer than two different tokens, or the seed
            is out of range.
    """
    require_seed(seed)
    if input_ids.shape[0] != 1 or len(input_ids.unique()) < 2:
        raise ValueError("`input_ids` must hold one text with at least two different tokens")
    network: Any = model.base_model
    if model.config.is_encoder_decoder:
        network = model.get_encoder()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(input_ids.shape[1], generator=generator)
    while torch.equal(input_ids[:, order], input_ids):
        order = torch.randperm(input_ids.shape[1], generator=generator)

    def states(ids: Tensor) -> Tensor:
        # One segment for the whole text: without it BERT would warn about the separators, which are permuted too.
        segments = {"token_type_ids": torch.zeros_like(ids)} if hasattr(model.config, "type_vocab_size") else {}
        return _output_vectors(network(input_ids=ids, **segments, return_dict=True))

    def difference() -> float:
        return float((states(input_ids[:, order]) - states(input_ids)[order]).abs().max())

    with evaluation_mode(model):
        with without_positions(network):
            without = difference()
        return OrderEffect(tuple(order.tolist()), difference(), without, float(states(input_ids).abs().max()))
