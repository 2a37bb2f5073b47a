"""Attention maps of any model that gives its weights, ours or stock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...modeling.losses import shift_right
from ...tokenization.processor import ImageSource
from .eager_mode import eager_attention
from .image_weights import image_weights, patch_weights
from .maps import AttentionMap
from .text_weights import (
    Look,
    attending_layers,
    decoder_start,
    encode_text,
    generate_labels,
    numbered,
    run_model,
    without_cache,
)
from .tokens import special_token

# How much more than one a row of weights may sum to: those of half precision are rounded.
SLACK = 0.05


def attention_map(
    model: PreTrainedModel,
    processor: Any,
    text: str | None = None,
    *,
    text_pair: str | None = None,
    target: str | None = None,
    image: ImageSource | None = None,
    kind: str | None = None,
) -> AttentionMap:
    """Has a model look at one text, or at one image, and gives its attention weights.

    The model may be on any kernel and in training: for the look it is on the eager one and in evaluation mode, then as
    it was. One text has no padding, so none is ever in a map.

    Args:
        model: any model of transformers that reads text, an image in patches (ViT), or either (CLIP), or writes about
            an image, and gives attention weights.
        processor: its tokenizer, its image processor, or a processor, which has both as attributes.
        text: what the model reads; of an encoder-decoder the source.
        text_pair: a second text, for a model that reads pairs.
        target: what the decoder of an encoder-decoder, or of a captioner, writes; what it generates if not given.
        image: what a captioner or a vision model looks at: an image, an array or a file.
        kind: which weights. A model of one stack has "self"; an encoder-decoder "cross" (the one that it gives if not
            told otherwise), "encoder" and "decoder", a recurrent one "alignment"; a captioner "image", and with a
            Transformer decoder "decoder".

    Raises:
        ValueError: for a model without such weights; for a text that has no tokens or more than the model has
            positions, or for several texts; or for an input that the model does not take.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"a {type(model).__name__} with a learned prompt can't be looked into: it is before every text"
        )
    whole, model = model, _part_that_takes(model, "input_ids" if image is None else "pixel_values")
    captions = model.main_input_name == "pixel_values" and model.config.is_encoder_decoder and model.can_generate()
    sees = model.main_input_name == "pixel_values" and not captions
    name = type(model).__name__
    _check_text("text", text, not (captions or sees), f"a {name} looks at an `image`")
    _check_text("text_pair", text_pair, not (captions or sees), f"a {name} looks at an `image`")
    _check_text("target", target, captions or model.config.is_encoder_decoder, f"a {name} has no decoder beside it")
    shown, grid = None, None
    with eager_attention(model):
        if captions:
            looks, shown, grid = image_weights(model, processor, image, target)
        elif sees:
            looks, shown, grid = patch_weights(model, processor, image)
        elif image is not None:
            raise ValueError(f"a {name} can't be shown an `image`: give one that sees, or a `text`")
        elif model.main_input_name != "input_ids":
            raise ValueError(f"a {name} takes `{model.main_input_name}`: give a model of texts or images")
        elif text is None:
            raise ValueError(f"`text` is missing: give what the {name} shall read")
        elif model.config.is_encoder_decoder:
            looks = _look_at_pair(model, _tokenizer(processor), text, text_pair, target)
        else:
            looks = _look_at_text(model, _tokenizer(processor), text, text_pair)
    kind, look = _choose(looks, kind, name)
    title = whole.config.name_or_path or name
    numbers = tuple(look.layers)
    found = AttentionMap(_stack(look, name), look.queries, look.keys, kind, title, numbers=numbers)
    return replace(found, image=shown, grid=grid) if kind == "image" else found


def _part_that_takes(model: PreTrainedModel, name: str) -> Any:
    """Of a model with a stack for texts and one for images (CLIP) the one that is asked; of others all."""
    if not hasattr(model, "get_text_features"):
        return model
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.main_input_name == name), model)


def _tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def _check_text(name: str, text: str | None, fits: bool, reason: str) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is a {type(text).__name__}: give one text, and several one by one")
    if not fits:
        raise ValueError(f"`{name}` is not to be given: {reason}")


def _choose(looks: dict[str, Look], kind: str | None, name: str) -> tuple[str, Look]:
    there = {key: look for key, look in looks.items() if look.layers}
    if not there:
        raise ValueError(
            f"a {name} gave no attention weights: it has none, or does not tell them (where it has a choice, load it "
            "with attn_implementation='eager')"
        )
    if kind is not None and kind not in there:
        raise ValueError(f"`kind` ({kind!r}) must be {' or '.join(map(repr, there))} for this {name}")
    # The first is what its family is known for.
    kind = kind or next(iter(there))
    return kind, there[kind]


def _stack(look: Look, name: str) -> np.ndarray:
    shapes = {tuple(layer.shape) for layer in look.layers.values()}
    (shape, *others) = shapes
    if others or shape[-2:] != (len(look.queries), len(look.keys)):
        raise ValueError(
            f"a {name} gave weights of the shapes {', '.join(map(str, sorted(shapes)))}, but every layer's must be "
            f"(1, heads, {len(look.queries)}, {len(look.keys)}), a weight for each pair of tokens"
        )
    weights = torch.cat(tuple(look.layers.values())).float().cpu().numpy()
    # Less than one is right where a head has a sink beside the tokens.
    if not (weights.min() >= 0 and weights.sum(axis=-1).max() <= 1 + SLACK):
        raise ValueError(
            f"a {name} gave numbers that are no weights: they are negative or NaN, or a row sums to more than one"
        )
    return weights


# Text


def _look_at_text(model: Any, tokenizer: Any, text: str, text_pair: str | None) -> dict[str, Look]:
    inputs, tokens = encode_text(model, tokenizer, "text", text, text_pair)
    # The stack under the head, since heads differ in what they take.
    outputs = run_model(model.base_model, **inputs, **without_cache(model))
    layers = attending_layers(model.config.get_text_config(), outputs.get("attentions"))
    return {"self": Look(layers, tokens, tokens)}


def _look_at_pair(model: Any, tokenizer: Any, text: str, text_pair: str | None, target: str | None) -> dict[str, Look]:
    inputs, source = encode_text(model, tokenizer, "text", text, text_pair)
    if target is None:
        labels, written = generate_labels(model, tokenizer, inputs)
    else:
        encoded, written = encode_text(model, tokenizer, "target", target)
        labels = encoded["input_ids"]
    start = decoder_start(model)
    outputs = run_model(model.base_model, **inputs, decoder_input_ids=shift_right(labels, start, None))
    read = numbered((special_token(tokenizer, start), *written[:-1]))
    cross, encoder, decoder = (
        attending_layers(model.config, outputs.get(f"{name}_attentions")) for name in ("cross", "encoder", "decoder")
    )
    if not encoder and not decoder:
        # Attention before there was any within a text.
        return {"alignment": Look(cross, written, source)}
    return {
        "cross": Look(cross, written, source),
        "encoder": Look(encoder, source, source),
        "decoder": Look(decoder, read, read),
    }
