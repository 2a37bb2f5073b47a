"""Looking at images: captioners, and models that see an image in patches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor

from ...modeling.losses import shift_right
from ...tokenization.processor import ImageSource, read_rgb
from .text_weights import (
    Look,
    attending_layers,
    check_length,
    decoder_start,
    encode_text,
    generate_labels,
    numbered,
    run_model,
)
from .tokens import Token, encoded_tokens, special_token

Sight = tuple[dict[str, Look], Image.Image, tuple[int, int]]


def image_weights(model: Any, processor: Any, image: ImageSource | None, target: str | None) -> Sight:
    """What a captioner looks at while it writes, the image as it was seen, and the grid over it.

    Raises:
        ValueError: if image or processor won't do, or the target has no tokens or too many.
    """
    name = type(model).__name__
    if image is None:
        raise ValueError(f"`image` is missing: give what the {name} shall look at")
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise ValueError(
            f"`processor` is a {type(processor).__name__}: a captioner needs its processor, which has "
            "an `image_processor` and a `tokenizer`"
        )
    seen = read_rgb(image)
    pixel_values = _pixels(model, processor.image_processor, seen)
    tokenizer = processor.tokenizer
    ours = hasattr(model, "feature_grid")
    if target is None:
        labels, written = generate_labels(model, tokenizer, {"pixel_values": pixel_values})
    elif ours:
        ids = processor(labels=target)["labels"][0]
        encoding = tokenizer(target, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
        encoding = encoding.convert_to_tensors("pt", prepend_batch_axis=True)
        end = special_token(tokenizer, ids[-1])
        words = encoded_tokens(tokenizer, encoding, [target])
        written = (*words, replace(end, word=words[-1].word + 1))
        check_length(model, tokenizer, "target", len(ids))
        labels = torch.tensor([ids], device=model.device)
    else:
        encoded, written = encode_text(model, tokenizer, "target", target)
        labels = encoded["input_ids"]
    start = decoder_start(model)
    outputs = run_model(model, pixel_values=pixel_values, decoder_input_ids=shift_right(labels, start, None))
    grid = model.feature_grid(*pixel_values.shape[-2:]) if ours else _grid(model.config, pixel_values)
    cross = attending_layers(model.config, outputs.cross_attentions)
    places = _places(grid)
    before = 0 if ours else _before(cross, model.config, grid, name)
    over = {number: layer[..., before : before + len(places)] for number, layer in cross.items()}
    read = numbered((special_token(tokenizer, start), *written[:-1]))
    looks = {
        "image": Look(over, written, places),
        "decoder": Look(attending_layers(model.config, outputs.decoder_attentions), read, read),
    }
    return looks, _as_seen(processor.image_processor, seen, pixel_values[0]), grid


def patch_weights(model: Any, processor: Any, image: ImageSource | None) -> Sight:
    """Where each patch, and [CLS], looks; the image as it was seen, and the grid over it.

    Raises:
        ValueError: if image or processor won't do, or the model gives no weights over all patches.
    """
    name = type(model).__name__
    if image is None:
        raise ValueError(f"`image` is missing: give what the {name} shall look at")
    image_processor = getattr(processor, "image_processor", processor)
    if not isinstance(image_processor, BaseImageProcessor):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a {name} needs its image processor")
    seen = read_rgb(image)
    pixel_values = _pixels(model, image_processor, seen)
    outputs = run_model(model, pixel_values=pixel_values)
    layers = attending_layers(model.config, outputs.get("attentions"))
    grid = _grid(model.config, pixel_values)
    places = _places(grid)
    before = _before(layers, model.config, grid, name)
    stop = before + len(places)
    names = ["[CLS]", *(f"extra {number}" for number in range(1, before))][:before]
    extra = tuple(Token(each, each, None, number, each) for number, each in enumerate(names))
    queries = (*extra, *(replace(place, word=place.word + before) for place in places))
    over = {number: layer[..., :stop, before:stop] for number, layer in layers.items()}
    return {"image": Look(over, queries, places)}, _as_seen(image_processor, seen, pixel_values[0]), grid


def _pixels(model: Any, image_processor: Any, image: Image.Image) -> Tensor:
    return image_processor(image, return_tensors="pt")["pixel_values"].to(model.device)


def _stack_config(config: Any) -> Any:
    """Of a model with a stack for images beside others the configuration of that one."""
    names = ("vision_config", "encoder")
    return next((getattr(config, name) for name in names if hasattr(config, name)), config)


def _grid(config: Any, pixel_values: Tensor) -> tuple[int, int]:
    config = _stack_config(config)
    side = getattr(config, "patch_size", None)
    sides = (side, side) if isinstance(side, int) else tuple(side or (1, 1))
    # Stages, each of which but the last joins four patches into one.
    joined = 2 ** (len(getattr(config, "depths", [1])) - 1)
    return tuple(length // (side * joined) for length, side in zip(pixel_values.shape[-2:], sides, strict=True))


def _before(layers: dict[int, Tensor], config: Any, grid: tuple[int, int], name: str) -> int:
    """How many there are before the patches: [CLS], and registers or the like."""
    # Those of a detector stand behind the patches.
    behind = getattr(_stack_config(config), "num_detection_tokens", 0)
    others = grid[0] * grid[1] + behind
    before = min((layer.shape[-1] for layer in layers.values()), default=others) - others
    if before < 0:
        raise ValueError(
            f"a {name} gave no weights over the {grid[0]} × {grid[1]} patches of the image: its attention is in "
            "windows, or over something else"
        )
    return before


def _places(grid: tuple[int, int]) -> tuple[Token, ...]:
    names = [f"row {row + 1}, column {column + 1}" for row, column in product(*map(range, grid))]
    return tuple(Token(name, name, None, number, name) for number, name in enumerate(names))


def _as_seen(image_processor: Any, image: Image.Image, pixels: Tensor) -> Image.Image:
    """The image at its own size; if only a part of it was seen, that part at the size that the model saw."""
    if not any(getattr(image_processor, name, None) for name in ("do_center_crop", "do_pad")):
        return image
    if getattr(image_processor, "do_normalize", False):
        mean, std = (
            torch.tensor(getattr(image_processor, name), device=pixels.device)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        pixels = pixels * std + mean
    return Image.fromarray((pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0).cpu().numpy())
