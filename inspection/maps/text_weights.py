"""The attention weights of models that read text, with the tokens that they connect."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...modeling.losses import shift_right
from .tokens import Token, decoded_tokens, encoded_tokens, special_token

# How many tokens a model generates if its generation configuration sets no limit.
NEW_TOKENS = 20
# Layer types of hybrid models that are recurrent or convolutional. Some models return the state of such a layer among
# the attention weights.
OTHER_LAYERS = ("linear_attention", "conv", "moe")

# What a stock model may raise if it lacks an input that it needs, such as a box for each word or a second image.
FOREIGN_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class TokenWeights:
    """The weights of one kind of attention, with the tokens that they connect.

    Args:
        layers: the weights of each layer that attends, (1, heads, queries, keys), by the layer's number in the model.
        queries: the token of each row.
        keys: the token of each column.
    """

    layers: dict[int, Tensor]
    queries: tuple[Token, ...]
    keys: tuple[Token, ...]


def single_stack_weights(model: Any, tokenizer: Any, text: str, text_pair: str | None) -> dict[str, TokenWeights]:
    """Returns the self-attention weights of a model of one stack, as the kind "self".

    Args:
        model: a model that reads text and has no separate decoder.
        tokenizer: its tokenizer.
        text: the text.
        text_pair: a second text, or None.

    Raises:
        ValueError: if the model cannot run on the text.
    """
    inputs, tokens = encode_text(model, tokenizer, "text", text, text_pair)
    # The stack without its head, because heads differ in the inputs that they take.
    outputs = run_model(model.base_model, **inputs, **cache_disabled(model))
    layers = attending_layers(model.config.get_text_config(), outputs.get("attentions"))
    return {"self": TokenWeights(layers, tokens, tokens)}


def seq2seq_weights(
    model: Any, tokenizer: Any, text: str, text_pair: str | None, target: str | None
) -> dict[str, TokenWeights]:
    """Returns the weights of an encoder-decoder, by kind: "cross", "encoder" and "decoder", or "alignment" alone.

    Args:
        model: an encoder-decoder that reads text.
        tokenizer: its tokenizer.
        text: the source.
        text_pair: a second source text, or None.
        target: the target; if None, the model generates it.

    Raises:
        ValueError: if the model cannot run on the texts.
    """
    inputs, source = encode_text(model, tokenizer, "text", text, text_pair)
    if target is None:
        labels, written = generate_target(model, tokenizer, inputs)
    else:
        encoded, written = encode_text(model, tokenizer, "target", target)
        labels = encoded["input_ids"]
    start = decoder_start(model)
    outputs = run_model(model.base_model, **inputs, decoder_input_ids=shift_right(labels, start, None))
    read = decoder_inputs(tokenizer, start, written)
    cross, encoder, decoder = (
        attending_layers(model.config, outputs.get(f"{name}_attentions")) for name in ("cross", "encoder", "decoder")
    )
    if not encoder and not decoder:
        # A recurrent model has no self-attention.
        return {"alignment": TokenWeights(cross, written, source)}
    return {
        "cross": TokenWeights(cross, written, source),
        "encoder": TokenWeights(encoder, source, source),
        "decoder": TokenWeights(decoder, read, read),
    }


def run_model(model: Any, **inputs: Any) -> Any:
    """Returns the outputs of a model, including its attention weights.

    Raises:
        ValueError: if the model fails on these inputs; the error quotes its message.
    """
    given = [f"`{name}`" for name in ("pixel_values", "input_ids", "decoder_input_ids") if name in inputs]
    try:
        return model(**inputs, output_attentions=True, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"a {type(model).__name__} cannot run on {' and '.join(given)} alone, or not on these values "
            f"({type(error).__name__}: {reason})"
        ) from error


def attending_layers(config: Any, weights: Iterable[Any] | None) -> dict[int, Tensor]:
    """Returns the weights of the layers that attend, by the layers' numbers in the model.

    Args:
        config: configuration of the stack, whose `layer_types` tell which layers attend, if it has them.
        weights: the attention weights that the stack returned, for every layer or only for those that attend.
    """
    # Some models return several tensors for one layer, one for each window or stage.
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
    """Returns the model's inputs for a text, and the tokens of the text.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        name: name of the text in errors; "target" encodes it as the target of a decoder.
        text: the text.
        text_pair: a second text, or None.

    Raises:
        ValueError: if the text has no tokens, more tokens than the model has positions, or ids outside the model's
            vocabulary.
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
        raise ValueError(f"`{name}` ({text!r}) has no tokens: give at least one word")
    check_length(model, tokenizer, name, len(tokens))
    _check_ids(model, name, encoding["input_ids"])
    # A tokenizer may return segments that the model does not take.
    segments = {"token_type_ids"} & inspect.signature(model.base_model.forward).parameters.keys()
    taken = ("input_ids", "attention_mask", *segments)
    return {key: encoding[key].to(model.device) for key in taken if key in encoding}, tokens


def cache_disabled(model: Any) -> dict[str, bool]:
    """Returns the argument that keeps a model from making a cache, or no argument if the model takes none."""
    # A single forward pass needs no cache, and some stacks with recurrent layers fail to make one.
    return dict.fromkeys({"use_cache"} & inspect.signature(model.base_model.forward).parameters.keys(), False)


def token_limit(model: Any, tokenizer: Any) -> int:
    """Returns the largest number of tokens that both a model and its tokenizer allow."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # XLNet has -1, for no limit. Models that number positions from 1 or 2 have fewer; their tokenizers know how many.
    return min(positions if positions and positions > 0 else math.inf, tokenizer.model_max_length)


def check_length(model: Any, tokenizer: Any, name: str, length: int) -> None:
    """Raises a ValueError if a text has more tokens than the model has positions."""
    limit = token_limit(model, tokenizer)
    if length > limit:
        raise ValueError(f"`{name}` has {length} tokens, but the model has room for {limit}: shorten it")


def _check_ids(model: Any, name: str, ids: Tensor) -> None:
    try:
        size = model.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError):
        # Some models have no embedding table, and so no limit; they compute embeddings from hashes, for example.
        return
    if int(ids.max()) >= size:
        raise ValueError(
            f"`{name}` has the id {int(ids.max())}, but the model has {size} tokens: use the model's own tokenizer"
        )


# The target of a decoder


def generate_target(model: Any, tokenizer: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, tuple[Token, ...]]:
    """Generates a target, and returns its ids as `generate_ids` does, and its tokens.

    Raises:
        ValueError: if the model cannot generate.
    """
    if not model.can_generate():
        raise ValueError(f"`target` is missing, and a {type(model).__name__} cannot generate one")
    labels = generate_ids(model, inputs)
    return labels, decoded_tokens(tokenizer, labels[0].tolist())


def generate_ids(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Generates one target, and returns its ids, (1, target), without the decoder's start token."""
    options = model.generation_config
    # Without a limit transformers would generate as many tokens, but warn.
    length = {} if options.max_new_tokens or options.max_length else {"max_new_tokens": NEW_TOKENS}
    # One sequence, and only its ids, whatever the model's generation configuration says.
    plain = {"do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False}
    return model.generate(**inputs, **plain, **length)[:, 1:]


def decoder_start(model: Any) -> int:
    """Returns the id of the token that a model's decoder starts with.

    Raises:
        ValueError: if neither of the model's configurations names it.
    """
    owners = (model.config, getattr(model, "generation_config", None))
    starts = [getattr(owner, "decoder_start_token_id", None) for owner in owners]
    start = next((each for each in starts if each is not None), None)
    if start is None:
        raise ValueError(
            "the model's configuration must have a `decoder_start_token_id`, the token that its decoder starts with"
        )
    return start


def decoder_inputs(tokenizer: Any, start: int, written: tuple[Token, ...]) -> tuple[Token, ...]:
    """Returns the tokens that a decoder reads while it writes a target: the start token and all but the last.

    Args:
        tokenizer: the tokenizer of the target.
        start: id of the start token.
        written: the tokens of the target.
    """
    # Word numbers shift by one, so that the start token is a word of its own.
    return (special_token(tokenizer, start), *(replace(token, word=token.word + 1) for token in written[:-1]))
