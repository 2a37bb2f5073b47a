"""The attention weights of captioners and of vision models over the parts of an image."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor

from ...modeling.losses import shift_right
from ...tokenization.processor import ImageSource, read_rgb
from .text_weights import (
    TokenWeights,
    attending_layers,
    check_length,
    decoder_inputs,
    decoder_start,
    encode_text,
    generate_target,
    run_model,
)
from .tokens import Token, encoded_tokens, special_token


class ImageWeights(NamedTuple):
    """The attention weights of a model that sees an image.

    Attributes:
        by_kind: the weights by kind of attention; those of "image" have the cells of the grid as keys.
        image: the image, or the part of it that the model saw.
        grid: height and width of the grid over the image.
    """

    by_kind: dict[str, TokenWeights]
    image: Image.Image
    grid: tuple[int, int]


def captioner_weights(model: Any, processor: Any, image: ImageSource | None, target: str | None) -> ImageWeights:
    """Returns the weights of a captioner while it writes a caption, of the kinds "image" and "decoder".

    Args:
        model: a captioner, from this package or from transformers.
        processor: its processor, with an image processor and a tokenizer.
        image: the image.
        target: the caption; if None, the model generates it.

    Raises:
        ValueError: if the image is missing, the processor is not a captioner's, the caption has no tokens or too many,
            or the weights are not over the grid.
    """
    name = type(model).__name__
    rgb = _read_image(image, name)
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise ValueError(
            f"`processor` is a {type(processor).__name__}: a captioner needs its processor, which has "
            "an `image_processor` and a `tokenizer`"
        )
    pixel_values = _pixel_values(model, processor.image_processor, rgb)
    tokenizer = processor.tokenizer
    is_ours = hasattr(model, "feature_grid")
    if target is None:
        labels, written = generate_target(model, tokenizer, {"pixel_values": pixel_values})
    elif is_ours:
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
    grid = model.feature_grid(*pixel_values.shape[-2:]) if is_ours else _patch_grid(model.config, pixel_values)
    cross = attending_layers(model.config, outputs.cross_attentions)
    cells = _cell_tokens(grid)
    first = 0 if is_ours else _extra_tokens(cross, model.config, grid, name)
    over_cells = {number: layer[..., first : first + len(cells)] for number, layer in cross.items()}
    read = decoder_inputs(tokenizer, start, written)
    by_kind = {
        "image": TokenWeights(over_cells, written, cells),
        "decoder": TokenWeights(attending_layers(model.config, outputs.decoder_attentions), read, read),
    }
    return ImageWeights(by_kind, _seen_image(processor.image_processor, rgb, pixel_values[0]), grid)


def patch_weights(model: Any, processor: Any, image: ImageSource | None) -> ImageWeights:
    """Returns the weights of a vision model from each patch, and from [CLS] and the like, to each patch.

    Args:
        model: a vision model over the patches of an image, such as ViT.
        processor: its image processor, or a processor that has one.
        image: the image.

    Raises:
        ValueError: if the image is missing, the processor has no image processor, or the model returns no weights over
            all patches.
    """
    name = type(model).__name__
    rgb = _read_image(image, name)
    image_processor = getattr(processor, "image_processor", processor)
    if not isinstance(image_processor, BaseImageProcessor):
        raise ValueError(f"`processor` is a {type(processor).__name__}: a {name} needs its image processor")
    pixel_values = _pixel_values(model, image_processor, rgb)
    outputs = run_model(model, pixel_values=pixel_values)
    layers = attending_layers(model.config, outputs.get("attentions"))
    grid = _patch_grid(model.config, pixel_values)
    cells = _cell_tokens(grid)
    first = _extra_tokens(layers, model.config, grid, name)
    stop = first + len(cells)
    names = ["[CLS]", *(f"extra {number}" for number in range(1, first))][:first]
    extra = tuple(Token(each, each, None, number, each) for number, each in enumerate(names))
    queries = (*extra, *(replace(cell, word=cell.word + first) for cell in cells))
    over_cells = {number: layer[..., :stop, first:stop] for number, layer in layers.items()}
    by_kind = {"image": TokenWeights(over_cells, queries, cells)}
    return ImageWeights(by_kind, _seen_image(image_processor, rgb, pixel_values[0]), grid)


def cell_names(grid: tuple[int, int]) -> list[str]:
    """Returns the names of the cells of a grid over an image, row by row."""
    return [f"row {row + 1}, column {column + 1}" for row, column in product(*map(range, grid))]


def _cell_tokens(grid: tuple[int, int]) -> tuple[Token, ...]:
    return tuple(Token(name, name, None, number, name) for number, name in enumerate(cell_names(grid)))


def _read_image(image: ImageSource | None, name: str) -> Image.Image:
    if image is None:
        raise ValueError(f"`image` is missing: a {name} needs an image to look at")
    return read_rgb(image)


def _pixel_values(model: Any, image_processor: Any, image: Image.Image) -> Tensor:
    return image_processor(image, return_tensors="pt")["pixel_values"].to(model.device)


def _vision_config(config: Any) -> Any:
    """Returns the configuration of the vision stack of a model with several stacks, or the configuration itself."""
    names = ("vision_config", "encoder")
    return next((getattr(config, name) for name in names if hasattr(config, name)), config)


def _patch_grid(config: Any, pixel_values: Tensor) -> tuple[int, int]:
    config = _vision_config(config)
    side = getattr(config, "patch_size", None)
    sides = (side, side) if isinstance(side, int) else tuple(side or (1, 1))
    # In a model of several stages, each stage but the last joins four patches into one.
    joined = 2 ** (len(getattr(config, "depths", [1])) - 1)
    return tuple(length // (side * joined) for length, side in zip(pixel_values.shape[-2:], sides, strict=True))


def _extra_tokens(layers: dict[int, Tensor], config: Any, grid: tuple[int, int], name: str) -> int:
    """Returns how many tokens precede the patches: [CLS], registers and the like."""
    # A detector has its detection tokens after the patches.
    after = getattr(_vision_config(config), "num_detection_tokens", 0)
    others = grid[0] * grid[1] + after
    extra = min((layer.shape[-1] for layer in layers.values()), default=others) - others
    if extra < 0:
        raise ValueError(
            f"a {name} returned no weights over the {grid[0]} × {grid[1]} patches of the image: its attention is in "
            "windows, or over something else"
        )
    return extra


def _seen_image(image_processor: Any, image: Image.Image, pixels: Tensor) -> Image.Image:
    """Returns the image in its own size, or if the processor crops or pads, the pixels that the model saw."""
    if not any(getattr(image_processor, name, None) for name in ("do_center_crop", "do_pad")):
        return image
    if getattr(image_processor, "do_normalize", False):
        mean, std = (
            torch.tensor(getattr(image_processor, name), device=pixels.device)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        pixels = pixels * std + mean
    return Image.fromarray((pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0).cpu().numpy())
