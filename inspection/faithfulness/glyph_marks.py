"""Attention with a ground truth: how much of a captioner's attention lies on a letter's mark while it names the mark.

Dimension letters: S examples, B examples of a batch, H height and W width of an image, P rows and Q columns of the
grid over the image, T target length, V vocabulary size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ...families.seeds import require_seed
from ...modeling.captioner import spatial_maps
from ..maps.attention_map import check_number
from ..maps.eager_mode import eager_attention
from ..maps.figure import FONT_SIZE, draw_heat

WHITE = 255
# A pixel belongs to the mark if the drawing is darker there than the letter alone by at least this much.
_DARKER = WHITE // 4
# The share of the letter's ink that may be missing from the drawing with the mark.
_LOST = 0.01
_BATCH = 64

# Names of baselines among the shares of `MarkFigures`.
EVEN, OTHER, MOST = "even", "other", "most"


@dataclass(frozen=True, eq=False)
class MarkedImage:
    """A drawing of a letter with a mark, and the position of the mark.

    Args:
        image: the drawing, dark on white, 8-bit greyscale.
        base: the letter without its mark, drawn at the same position.
        mask: the pixels of the mark, (H, W).
        caption: the true caption.
        spans: start and end in the caption of each word whose attention is measured, by a name for the word; "mark"
            names the word of the mark.
        mark: name of the mark.
        character: the letter with its mark.
    """

    image: Image.Image
    base: Image.Image
    mask: np.ndarray
    caption: str
    spans: Mapping[str, tuple[int, int]]
    mark: str
    character: str


@dataclass(frozen=True, eq=False)
class MarkFigures:
    """The measurements of each example.

    Attributes:
        shares: three shares of attention, (S, 3), by the name of a word of `MarkedImage.spans` or of a baseline. The
            columns are the share on the pixels of the mark, if each weight is spread evenly over its cell; the share
            on the cells that touch the mark; and 1 if the largest weight is on such a cell, else 0. The baselines are
            "other", the map of another example with the same mark while the mark is named (NaN if there is no other);
            "even", equal weights, whose third column is the share of cells that touch the mark; and "most", the
            largest shares that any weights could have.
        maps: the weights of each word, (S, P, Q).
        probability: probability of the mark's words after the true words before them, (S,), for three images: "is",
            the image itself; "mark", the image without its mark; and "letter", the image without as many pixels of the
            letter's ink.
        right: whether the mark's words are the most probable ones, (S,).
    """

    shares: Mapping[str, np.ndarray]
    maps: Mapping[str, np.ndarray]
    probability: Mapping[str, np.ndarray]
    right: np.ndarray


def mark_pixels(image: Image.Image, base: Image.Image) -> np.ndarray | None:
    """Returns the pixels of a letter's mark, by which its drawing is darker than that of the letter alone.

    Args:
        image: the drawing of the letter with its mark.
        base: the drawing of the letter alone.

    Returns:
        (H, W), or None if more than 1% of the letter's ink is missing from the drawing with the mark, as in fonts that
        draw the two in different positions or shapes.
    """
    full, alone = (np.asarray(drawn).astype(int) for drawn in (image, base))
    if np.clip(full - alone, 0, None).sum() > _LOST * (WHITE - alone).sum():
        return None
    return alone - full >= _DARKER


def cell_coverage(mask: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Returns the share of each cell of a grid that a mask covers.

    The cells divide the image into equal rectangles, and a pixel may lie in several of them. The sum of weights times
    coverage is the weight on the mask if each weight is spread evenly over its cell.

    Args:
        mask: the pixels, (H, W).
        grid: height and width of the grid.

    Returns:
        (P, Q).
    """
    rows, columns = (_overlaps(length, cells) for length, cells in zip(mask.shape, grid, strict=True))
    return rows @ mask @ columns.T


def _overlaps(length: int, cells: int) -> np.ndarray:
    """Returns the share of each cell that each pixel makes up along one axis, (cells, length)."""
    edges = np.linspace(0, length, cells + 1)
    pixels = np.arange(length)
    inside = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.clip(inside, 0, None) * cells / length


def mark_shares(weights: np.ndarray, coverage: np.ndarray) -> np.ndarray:
    """Returns the three shares of `MarkFigures`, (S, 3), of weights and of the coverage by marks, both (S, P, Q)."""
    weights, coverage = weights.reshape(len(weights), -1), coverage.reshape(len(coverage), -1)
    largest = coverage[np.arange(len(coverage)), weights.argmax(axis=1)] > 0
    return np.stack([(weights * coverage).sum(1), (weights * (coverage > 0)).sum(1), largest], axis=1)


@torch.no_grad()
def receptive_field(model: Any, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns which pixels each cell of a captioner can see, found by changing one row or column of pixels at a time.

    Args:
        model: a captioner of this package.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        Whether each row of cells sees each row of pixels, (P, H), and the same for columns, (Q, W).
    """
    grid = model.feature_grid(height, width)
    # In float64, because in float32 rounding may change a cell that does not see the pixels.
    encoder = copy.deepcopy(model.encoder).double().eval()
    generator = torch.Generator().manual_seed(0)
    channels = getattr(encoder.backbone.config, "num_channels", 3)
    image, other = torch.randn(2, channels, height, width, generator=generator, dtype=torch.float64).to(model.device)

    def features(images: Tensor) -> Tensor:
        return encoder(images, return_dict=True).last_hidden_state.unflatten(1, grid)  # (images, P, Q, width)

    expected = features(image[None])

    def seen(along: int) -> Iterator[Tensor]:
        for place in range(image.shape[along]):
            changed = image.clone()
            changed.select(along, place).copy_(other.select(along, place))
            difference = (features(changed[None]) - expected)[0].abs().amax(dim=-1)  # (P, Q)
            yield difference.amax(dim=2 - along) > 1e-9 * expected.abs().max()

    return torch.stack(list(seen(1)), dim=1).cpu(), torch.stack(list(seen(2)), dim=1).cpu()


def erase_patch(image: Image.Image, base: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Erases as many pixels of the letter's ink as its mark has, those nearest to a random one.

    Args:
        image: the drawing of the letter with its mark.
        base: the drawing of the letter alone.
        rng: draws the pixel.
    """
    pixels, alone = np.array(image), np.asarray(base)
    number = int((pixels != alone).sum())
    rows, columns = np.nonzero((alone < WHITE) & (pixels == alone))
    centre = rng.integers(len(rows))
    distances = (rows - rows[centre]) ** 2 + (columns - columns[centre]) ** 2
    nearest = np.argsort(distances, kind="stable")[:number]
    pixels[rows[nearest], columns[nearest]] = WHITE
    return Image.fromarray(pixels)


def measure_marks(
    model: Any,
    processor: Any,
    examples: Sequence[MarkedImage],
    *,
    layer: int = -1,
    head: int | str = "mean",
    seed: int = 0,
) -> MarkFigures:
    """Measures how much of a captioner's attention lies on the marks while it reads the true captions.

    The map of a word of several tokens is the mean of their maps, its probability the product of their probabilities.

    Args:
        model: a captioner of this package with attention.
        processor: its processor.
        examples: drawings of letters with marks.
        layer: number of the layer from 0, or counted from the last, which is -1.
        head: number of the head, counted in the same way, or "mean" over all heads.
        seed: seed of the choice of other examples and of the erased patches.

    Raises:
        ValueError: if there are no examples, the captioner has no attention, there is no such layer or head, or the
            tokenizer does not know a word or returns no offsets.
    """
    if not examples:
        raise ValueError("`examples` is empty: give at least one")
    require_seed(seed)
    rng = np.random.default_rng(seed)
    maps: dict[str, list[np.ndarray]] = {name: [] for name in examples[0].spans}
    probability: dict[str, list[float]] = {name: [] for name in ("is", "mark", "letter")}
    right: list[bool] = []
    with eager_attention(model):
        for start in range(0, len(examples), _BATCH):
            batch = examples[start : start + _BATCH]
            words = [_find_words(processor.tokenizer, example) for example in batch]
            labels = processor(labels=[each.caption for each in batch], return_tensors="pt")["labels"].to(model.device)
            images = {
                "is": [each.image for each in batch],
                "mark": [each.base for each in batch],
                "letter": [erase_patch(each.image, each.base, rng) for each in batch],
            }
            for name, shown in images.items():
                pixel_values = processor(images=shown, return_tensors="pt")["pixel_values"].to(model.device)
                outputs = model(
                    pixel_values,
                    decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
                    output_attentions=name == "is",
                    return_dict=True,
                )
                scores = outputs.logits.double().log_softmax(dim=-1)  # (B, T, V)
                own = scores.gather(2, labels.clamp(min=0)[..., None])[..., 0]
                probability[name] += [float(own[k, each["mark"]].sum().exp()) for k, each in enumerate(words)]
                if name == "is":
                    best = scores.argmax(dim=-1) == labels
                    right += [bool(best[k, each["mark"]].all()) for k, each in enumerate(words)]
                    chosen = _choose_maps(model, outputs, tuple(pixel_values.shape[-2:]), layer, head)  # (B, T, P, Q)
                    for k, each in enumerate(words):
                        for word, tokens in each.items():
                            maps[word].append(chosen[k, tokens].mean(axis=0))
    stacked = {name: np.stack(each) for name, each in maps.items()}
    grid = stacked["mark"].shape[1:]
    coverage = np.stack([cell_coverage(example.mask, grid) for example in examples])
    return MarkFigures(
        shares=_all_shares(stacked, coverage, _same_mark([example.mark for example in examples], rng)),
        maps=stacked,
        probability={name: np.array(each) for name, each in probability.items()},
        right=np.array(right),
    )


def _find_words(tokenizer: Any, example: MarkedImage) -> dict[str, list[int]]:
    """Returns the positions in the labels of the tokens of each word."""
    if not tokenizer.is_fast:
        raise ValueError(f"`processor` has a {type(tokenizer).__name__}, which returns no offsets of tokens")
    encoding = tokenizer(
        example.caption, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    found = {}
    for name, (start, end) in example.spans.items():
        found[name] = [place for place, offset in enumerate(offsets) if offset[0] < end and offset[1] > start]
        if any(ids[place] == tokenizer.unk_token_id for place in found[name]) or not found[name]:
            raise ValueError(f"`processor` does not know {example.caption[start:end]!r} of {example.caption!r}")
    return found


def _choose_maps(model: Any, outputs: Any, size: tuple[int, int], layer: int, head: int | str) -> np.ndarray:
    if not outputs.cross_attentions or outputs.cross_attentions[0] is None:
        raise ValueError(f"`model` is a {type(model).__name__} without attention")
    maps = spatial_maps(outputs.cross_attentions, model.feature_grid(*size)).float().cpu().numpy()
    heads = maps[check_number("layer", layer, len(maps))].swapaxes(0, 1)  # (heads, B, T, P, Q)
    return heads.mean(axis=0) if head == "mean" else heads[check_number("head", head, len(heads), " or 'mean'")]


def _same_mark(marks: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """Returns for each example the number of another one with the same mark, or -1 if there is none."""
    others = np.full(len(marks), -1)
    for mark in sorted(set(marks)):
        members = rng.permutation([place for place, each in enumerate(marks) if each == mark])
        if len(members) > 1:
            others[members] = np.roll(members, 1)
    return others


def _all_shares(maps: Mapping[str, np.ndarray], coverage: np.ndarray, others: np.ndarray) -> dict[str, np.ndarray]:
    shares = {name: mark_shares(each, coverage) for name, each in maps.items()}
    shares[OTHER] = np.where(others[:, None] < 0, np.nan, mark_shares(maps["mark"][others], coverage))
    touched = (coverage > 0).mean(axis=(1, 2))
    shares[EVEN] = np.stack([coverage.mean(axis=(1, 2)), touched, touched], axis=1)
    shares[MOST] = np.stack([coverage.max(axis=(1, 2)), *np.ones((2, len(coverage)))], axis=1)
    return shares


def plot_marks(
    examples: Sequence[MarkedImage], figures: MarkFigures, chosen: Sequence[int], output: str | Path
) -> None:
    """Draws some examples with their marks outlined, and saves the figure.

    Each row shows the weights of one word over the images; all panels share one colour scale. Below each panel is the
    share of the weights on the cells that touch the mark.

    Args:
        examples: the measured examples.
        figures: the measurements.
        chosen: numbers of the examples to draw.
        output: file of the figure.
    """
    names = list(figures.maps)
    largest = max(float(figures.maps[name][chosen].max()) for name in names)
    figure = Figure(figsize=(1.0 + 1.5 * len(chosen), 0.4 + 2.1 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), len(chosen), squeeze=False)
    for row, name in enumerate(names):
        for axes, number in zip(grid[row], chosen, strict=True):
            example, weights = examples[number], figures.maps[name][number]
            height, width = example.mask.shape
            axes.imshow(example.image, cmap="gray", vmin=0, vmax=WHITE)
            draw_heat(axes, weights / largest, (width, height), interpolation="nearest")
            # Each pixel is enlarged to many small squares, so that the outline follows the edges of pixels.
            fine = np.kron(np.pad(example.mask, 1), np.ones((8, 8)))
            ends = (-1.5, width + 0.5, -1.5, height + 0.5)
            axes.contour(fine, levels=[0.5], colors="tab:blue", linewidths=1.2, extent=ends)
            start, end = example.spans[name]
            axes.set_title(f"“{example.caption[start:end]}”", fontsize=FONT_SIZE)
            axes.set_xlabel(f"{figures.shares[name][number, 1]:.0%} on its cells", fontsize=FONT_SIZE - 1)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlim(-0.5, width - 0.5)
            axes.set_ylim(height - 0.5, -0.5)
    figure.savefig(output, dpi=110, bbox_inches="tight")
