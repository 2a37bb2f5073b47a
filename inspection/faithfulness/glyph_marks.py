"""Attention with a ground truth: how much of a captioner's attention lies on the mark of a letter while it names it.

Dimension letters: S examples, H height and W width of an image, P rows and Q columns of the grid of places that a
captioner looks at, T target length.
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

from ...configuration.seeds import require_seed
from ...modeling.captioner import spatial_maps
from ..maps.eager_mode import eager_attention
from ..maps.figure import FONT_SIZE, HEAT
from ..maps.maps import check_number

WHITE = 255
# What a drawing has more than that of its letter alone is the mark, where it is darker by a quarter of black; and the
# letter must be in it but for so much of its ink.
_DARKER = WHITE // 4
_LOST = 0.01
_BATCH = 64

# What shares are measured of: see `MarkFigures`.
EVEN, OTHER, MOST = "even", "other", "most"


@dataclass(frozen=True, eq=False)
class MarkedImage:
    """A letter with a mark, and where the mark is.

    Args:
        image: dark on white, 8-bit greyscale.
        base: the letter without its mark, drawn at the same place.
        mask: the pixels of the mark, (H, W).
        caption: the true caption.
        spans: where the words that are looked at begin and end in the caption, by a name for each; "mark" is that of
            the mark.
        mark: what the mark is called.
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
    """What was measured, for each example.

    Attributes:
        shares: (S, 3), by whose attention it is: of the words of `MarkedImage.spans`; of "other", the map of another
            example with the same mark for its word (NaN where there is none); of "even" weights; and "most", the
            largest that any weights could come to. The three are the share of the weights that falls on the mark's
            pixels, if each weight is spread evenly over its place's cell; the share on the places whose cells hold
            some of the mark; and whether the largest weight is on such a place (1 or 0; of "even" weights how many
            places are).
        maps: the weights of each word, (S, P, Q).
        probability: of the mark's words after the true ones before them, (S,), of the image as it "is", without its
            "mark", and without as many pixels of the ink of its "letter".
        right: whether those words are the most probable, (S,).
    """

    shares: Mapping[str, np.ndarray]
    maps: Mapping[str, np.ndarray]
    probability: Mapping[str, np.ndarray]
    right: np.ndarray


def mark_pixels(image: Image.Image, base: Image.Image) -> np.ndarray | None:
    """Where a letter has a mark: what its drawing has more than that of the letter alone, (H, W).

    Returns:
        None if the letter alone is not a part of the drawing, but for 1% of its ink. (Some fonts draw the two in
        different places or shapes.)
    """
    full, alone = (np.asarray(drawn).astype(int) for drawn in (image, base))
    if np.clip(full - alone, 0, None).sum() > _LOST * (WHITE - alone).sum():
        return None
    return alone - full >= _DARKER


def covered(mask: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The share of each place's cell that a mask (H, W) covers, (P, Q).

    The cells divide the image into equal rectangles; a pixel may lie in several. So the sum of weights times this is
    what falls on the mask if each weight is spread evenly over its cell.
    """
    rows, columns = (_overlaps(length, cells) for length, cells in zip(mask.shape, grid, strict=True))
    return rows @ mask @ columns.T


def _overlaps(length: int, cells: int) -> np.ndarray:
    """The share of each cell that each pixel makes up, (cells, length)."""
    edges = np.linspace(0, length, cells + 1)
    pixels = np.arange(length)
    inside = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.clip(inside, 0, None) * cells / length


def shares_on(weights: np.ndarray, covers: np.ndarray) -> np.ndarray:
    """The shares of `MarkFigures`, (S, 3), of weights (S, P, Q) and of what the marks cover (S, P, Q)."""
    weights, covers = weights.reshape(len(weights), -1), covers.reshape(len(covers), -1)
    largest = covers[np.arange(len(covers)), weights.argmax(axis=1)] > 0
    return np.stack([(weights * covers).sum(1), (weights * (covers > 0)).sum(1), largest], axis=1)


@torch.no_grad()
def receptive_field(model: Any, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Which pixels a captioner's places can see at all, found by changing them one row or column at a time.

    Returns:
        (P, H), whether each row of places sees each row of pixels, and (Q, W), the same for columns.
    """
    grid = model.feature_grid(height, width)
    # With few digits, what was computed together may differ by a rounding.
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


def without_patch(image: Image.Image, base: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Erases as many pixels of the letter's ink as its mark has: those next to one that is drawn at random."""
    pixels, alone = np.array(image), np.asarray(base)
    number = int((pixels != alone).sum())
    rows, columns = np.nonzero((alone < WHITE) & (pixels == alone))
    middle = rng.integers(len(rows))
    distances = (rows - rows[middle]) ** 2 + (columns - columns[middle]) ** 2
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
    """Measures how much of a captioner's attention lies on the marks, while it is given the true captions.

    A name of several tokens has the mean of their maps, and the product of their probabilities.

    Args:
        model: a captioner that attends.
        processor: its processor.
        examples: letters with marks.
        layer: whose weights, from 0, or from the last one, -1.
        head: the same, or "mean" over all.
        seed: of what is drawn: the maps of other examples, and the patches that are erased.

    Raises:
        ValueError: if there are no examples, the captioner attends to nothing, there is no such layer or head, or the
            tokenizer does not know a word or does not tell where tokens are.
    """
    if not examples:
        raise ValueError("`examples` holds none: give one or more")
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
                "letter": [without_patch(each.image, each.base, rng) for each in batch],
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
    covers = np.stack([covered(example.mask, grid) for example in examples])
    return MarkFigures(
        shares=_all_shares(stacked, covers, _others([example.mark for example in examples], rng)),
        maps=stacked,
        probability={name: np.array(each) for name, each in probability.items()},
        right=np.array(right),
    )


def _find_words(tokenizer: Any, example: MarkedImage) -> dict[str, list[int]]:
    """The places of the tokens of each word in the labels."""
    if not tokenizer.is_fast:
        raise ValueError(f"`processor` has a {type(tokenizer).__name__}, which does not tell where tokens are")
    encoding = tokenizer(
        example.caption, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    found = {}
    for name, (start, end) in example.spans.items():
        found[name] = [place for place, offset in enumerate(offsets) if offset[0] < end and offset[1] > start]
        if any(ids[place] == tokenizer.unk_token_id for place in found[name]) or not found[name]:
            raise ValueError(f"`processor` does not know {example.caption[start:end]!r}, of {example.caption!r}")
    return found


def _choose_maps(model: Any, outputs: Any, size: tuple[int, int], layer: int, head: int | str) -> np.ndarray:
    if not outputs.cross_attentions or outputs.cross_attentions[0] is None:
        raise ValueError(f"`model` is a {type(model).__name__} that attends to nothing")
    maps = spatial_maps(outputs.cross_attentions, model.feature_grid(*size)).float().cpu().numpy()
    heads = maps[check_number("layer", layer, len(maps))].swapaxes(0, 1)  # (heads, B, T, P, Q)
    return heads.mean(axis=0) if head == "mean" else heads[check_number("head", head, len(heads), " or 'mean'")]


def _others(marks: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """For each example another one with the same mark, -1 where there is none."""
    others = np.full(len(marks), -1)
    for mark in sorted(set(marks)):
        members = rng.permutation([place for place, each in enumerate(marks) if each == mark])
        if len(members) > 1:
            others[members] = np.roll(members, 1)
    return others


def _all_shares(maps: Mapping[str, np.ndarray], covers: np.ndarray, others: np.ndarray) -> dict[str, np.ndarray]:
    shares = {name: shares_on(each, covers) for name, each in maps.items()}
    shares[OTHER] = np.where(others[:, None] < 0, np.nan, shares_on(maps["mark"][others], covers))
    touched = (covers > 0).mean(axis=(1, 2))
    shares[EVEN] = np.stack([covers.mean(axis=(1, 2)), touched, touched], axis=1)
    shares[MOST] = np.stack([covers.max(axis=(1, 2)), *np.ones((2, len(covers)))], axis=1)
    return shares


def plot_marks(
    examples: Sequence[MarkedImage], figures: MarkFigures, chosen: Sequence[int], output: str | Path
) -> None:
    """Draws some examples, their marks outlined: a row for each word, with its weights over the image.

    One scale of colour holds for all. Under each is the share on the places that hold some of the mark.

    Args:
        examples: what was measured.
        figures: what came of it.
        chosen: the numbers of those to draw.
        output: the file.
    """
    names = list(figures.maps)
    largest = max(float(figures.maps[name][chosen].max()) for name in names)
    figure = Figure(figsize=(1.0 + 1.5 * len(chosen), 0.4 + 2.1 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), len(chosen), squeeze=False)
    for row, name in enumerate(names):
        for axes, number in zip(grid[row], chosen, strict=True):
            example, weights = examples[number], figures.maps[name][number]
            height, width = example.mask.shape
            place = (-0.5, width - 0.5, height - 0.5, -0.5)
            heat = np.concatenate([np.broadcast_to(HEAT, (*weights.shape, 3)), 0.85 * weights[..., None] / largest], 2)
            axes.imshow(example.image, cmap="gray", vmin=0, vmax=WHITE)
            axes.imshow(heat, extent=place, interpolation="nearest")
            # Of many small squares for each pixel, so that the outline goes around pixels.
            fine = np.kron(np.pad(example.mask, 1), np.ones((8, 8)))
            ends = (-1.5, width + 0.5, -1.5, height + 0.5)
            axes.contour(fine, levels=[0.5], colors="tab:blue", linewidths=1.2, extent=ends)
            start, end = example.spans[name]
            axes.set_title(f"“{example.caption[start:end]}”", fontsize=FONT_SIZE)
            axes.set_xlabel(f"{figures.shares[name][number, 1]:.0%} on its places", fontsize=FONT_SIZE - 1)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlim(place[:2])
            axes.set_ylim(place[2:])
    figure.savefig(output, dpi=110, bbox_inches="tight")
