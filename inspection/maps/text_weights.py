"""Running a model, ours or stock, for its attention weights, and what the weights are of."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .tokens import Token, decoded_tokens, encoded_tokens

# How many a model writes that does not say.
NEW_TOKENS = 20
# Layers of hybrid models that are recurrent or convolutions, not attention. Some models give their state for weights.
OTHER_LAYERS = ("linear_attention", "conv", "moe")

# A stock model that needs what it was not given (a box for each word, a second image) raises whatever comes of it.
FOREIGN_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Look:
    """What one kind of attention of a model came to.

    Args:
        layers: the weights of each layer that attends, by its number in the model: (1, heads, queries, keys).
        queries: the token that each row belongs to.
        keys: the token that each column belongs to.
    """

    layers: dict[int, Tensor]
    queries: tuple[Token, ...]
    keys: tuple[Token, ...]


def run_model(model: Any, **inputs: Any) -> Any:
    """A model's outputs, attention weights among them.

    Raises:
        ValueError: if the model can't be run on these inputs, with what it says.
    """
    given = [f"`{name}`" for name in ("pixel_values", "input_ids", "decoder_input_ids") if name in inputs]
    try:
        return model(**inputs, output_attentions=True, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"a {type(model).__name__} can't be run on {' and '.join(given)} alone, or not on these "
            f"({type(error).__name__}: {reason})"
        ) from error


def attending_layers(config: Any, weights: Iterable[Any] | None) -> dict[int, Tensor]:
    """The weights of the layers that attend, by their numbers in the model, where its configuration tells them.

    Args:
        config: that of the stack.
        weights: what it gave, of each layer or of those alone that attend.
    """
    # Some models give several for one layer, of windows or of stages.
    given = [layer if isinstance(layer, Tensor) else None for layer in weights or ()]
    types = getattr(config, "layer_types", None) or ()
    attending = [number for number, kind in enumerate(types) if kind not in OTHER_LAYERS]
    if len(given) == len(types):
        given = [layer if number in attending else None for number, layer in enumerate(given)]
    elif len(given) == len(attending):
        return {number: layer for number, layer in zip(attending, given, strict=True) if layer is not None}
    return {number: layer for number, layer in enumerate(given) if layer is not None}


def encode_text(
    model: Any, tokenizer: Any, name: str, text: str, text_pair: str | None = None
) -> tuple[dict[str, Tensor], tuple[Token, ...]]:
    """A text as the model takes it, and its tokens.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        name: what errors call the text; "target" is one that a decoder writes.
        text: the text.
        text_pair: a second one.

    Raises:
        ValueError: if it has no tokens, or more than the model has positions, or some that the model does not know.
    """
    texts = [text] if text_pair is None else [text, text_pair]
    given = {"text_target": text} if name == "target" else {"text": text, "text_pair": text_pair}
    encoding = tokenizer(
        **given,
        padding=False,
        truncation=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    encoding = encoding.convert_to_tensors("pt", prepend_batch_axis=True)
    tokens = encoded_tokens(tokenizer, encoding, texts)
    if all(token.span is None for token in tokens):
        raise ValueError(f"`{name}` ({text!r}) has no tokens: give a word or more")
    check_length(model, tokenizer, name, len(tokens))
    _check_ids(model, name, encoding["input_ids"])
    taken = ("input_ids", "attention_mask", *_segments(model))
    return {key: encoding[key].to(model.device) for key in taken if key in encoding}, tokens


def _segments(model: Any) -> tuple[str, ...]:
    # A tokenizer may tell segments apart that a model does not.
    return tuple({"token_type_ids"} & inspect.signature(model.base_model.forward).parameters.keys())


def without_cache(model: Any) -> dict[str, bool]:
    """The option that keeps a model from making a cache, if it has one."""
    # One look needs no cache, and that of a stack with recurrent layers can't always be made.
    return dict.fromkeys({"use_cache"} & inspect.signature(model.base_model.forward).parameters.keys(), False)


def most_tokens(model: Any, tokenizer: Any) -> int:
    """How many tokens a model and its tokenizer have room for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # XLNet has a -1 for no limit. Some models number positions from the second or later; their tokenizers know.
    return min(positions if positions and positions > 0 else math.inf, tokenizer.model_max_length)


def check_length(model: Any, tokenizer: Any, name: str, length: int) -> None:
    """Raises a ValueError if there are more tokens than the model has positions."""
    limit = most_tokens(model, tokenizer)
    if length > limit:
        raise ValueError(f"`{name}` has {length} tokens, and the model has room for {limit}: shorten it")


def _check_ids(model: Any, name: str, ids: Tensor) -> None:
    try:
        size = model.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError):
        # Some models make their embeddings in other ways, out of hashes for one: there is no such limit to check.
        return
    if int(ids.max()) >= size:
        raise ValueError(
            f"`{name}` has the id {int(ids.max())}, and the model has {size} tokens: give it its own tokenizer"
        )


# A decoder beside it


def generate_labels(model: Any, tokenizer: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, tuple[Token, ...]]:
    """What a model itself writes, as `written_labels`, and its tokens.

    Raises:
        ValueError: if it can't generate.
    """
    if not model.can_generate():
        raise ValueError(f"`target` is missing, and a {type(model).__name__} can't generate one: give it")
    labels = written_labels(model, inputs)
    return labels, decoded_tokens(tokenizer, labels[0].tolist())


def written_labels(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What a model itself writes, (1, target), without the token that its decoder starts with."""
    options = model.generation_config
    # transformers would take as many, and warn of it.
    length = {} if options.max_new_tokens or options.max_length else {"max_new_tokens": NEW_TOKENS}
    # One, and no more than its ids, whatever the model is set to.
    plain = {"do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False}
    return model.generate(**inputs, **plain, **length)[:, 1:]


def decoder_start(model: Any) -> int:
    """The token that a model's decoder starts with.

    Raises:
        ValueError: if its configurations do not tell.
    """
    owners = (model.config, getattr(model, "generation_config", None))
    starts = [getattr(owner, "decoder_start_token_id", None) for owner in owners]
    start = next((each for each in starts if each is not None), None)
    if start is None:
        raise ValueError(
            "the model's configuration must have a `decoder_start_token_id`, which its decoder begins with"
        )
    return start


def numbered(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """Tokens whose words are told from each other although one was put in front."""
    return tuple(replace(token, word=token.word + 1) if place else token for place, token in enumerate(tokens))
