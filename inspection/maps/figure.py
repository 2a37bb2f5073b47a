"""Attention maps as pictures, with matplotlib."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image

from .tokens import number_of

FONT = "DejaVu Sans"  # matplotlib's own
FONT_SIZE = 9
# Inches: what a token gets where there is room, the longer side of the grid at the least and at the most.
CELL, LEAST, MOST = 0.22, 2.4, 10.0
LONGEST_LABEL = 24
# Above an image, with the weight behind it: as many as a panel is wide.
LONGEST_TITLE = 17
COLUMNS = 6
# A page shows the maps of any number of words over an image, a picture those of so many.
MOST_PANELS = 35
HEAT = (0.85, 0.1, 0.3)


def draw_map(matrix: np.ndarray, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """Draws weights (queries, keys) as a grid, the keys on top; of a long text some labels are left out.

    Args:
        matrix: the weights.
        queries: label of each row.
        keys: label of each column.
        title: of the picture.
    """
    height, width = matrix.shape
    cell = min(max(CELL, LEAST / max(height, width)), MOST / max(height, width))
    # A text that is much longer than the other would leave that one a line.
    size = [max(length * cell, 0.6) for length in (width, height)]
    figure = Figure(figsize=(size[0] + 2.6, size[1] + 1.8), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=matrix.max() or 1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    for axis, labels, inches in ((axes.xaxis, keys, size[0]), (axes.yaxis, queries, size[1])):
        step = math.ceil(len(labels) * FONT_SIZE * 1.25 / 72 / inches)
        axis.set_ticks(range(0, len(labels), step))
        shown, style = drawable(labels[::step])
        axis.set_ticklabels(shown, **style)
    for label in axes.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 1 else 0)
    axes.tick_params(length=2 if len(queries) > 40 else 0)
    axes.spines[:].set_color("0.8")
    axes.set_ylabel("query", color="0.4")
    axes.set_xlabel("key", color="0.4")
    bar = figure.colorbar(picture, ax=axes, shrink=min(1.0, 2.0 / size[1]), aspect=15, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    set_title(figure, title)
    return figure


def draw_image_map(
    matrix: np.ndarray, words: Sequence[str], image: Image.Image, grid: tuple[int, int], title: str
) -> Figure:
    """Draws for each word the weights (words, places of the grid) over the image, at its own resolution.

    Beside a word is its largest weight; one scale of colour holds for all words.

    Args:
        matrix: the weights.
        words: label of each row.
        image: what was looked at.
        grid: height and width of the grid.
        title: of the picture.
    """
    pixels = np.asarray(image.convert("RGB"))
    height, width = image.height, image.width
    columns = min(COLUMNS, len(words) + 1)
    rows = math.ceil((len(words) + 1) / columns)
    side = 1.7
    tall = min(max(height / width, 0.4), 2.5)
    figure = Figure(figsize=(max(columns * side, 5.0), rows * (side * tall + 0.3) + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for place, axes in enumerate(panels):
        axes.set_axis_off()
        if place > len(words):
            continue
        axes.imshow(pixels)
        name, largest = "the image", ""
        if place:
            weights = matrix[place - 1].reshape(grid)
            share = weights / (matrix.max() or 1)
            heat = np.concatenate([np.broadcast_to(HEAT, (*grid, 3)), 0.85 * share[..., None]], axis=-1)
            axes.imshow(heat, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="bilinear")
            name, largest = words[place - 1], f" ({weights.max():.0%})"
        (label,), style = drawable([name], limit=LONGEST_TITLE)
        axes.set_title(label + largest, **style)
    set_title(figure, title)
    return figure


def set_title(figure: Figure, title: str) -> None:
    """Puts a title above a figure, in as many lines as it needs."""
    # As wide as the figure allows, at about half a font size a character.
    width = int(figure.get_figwidth() * 72 / (0.55 * FONT_SIZE)) - 2
    lines, style = drawable(wrap(title, width), limit=None)
    figure.suptitle("\n".join(lines), x=0.01, ha="left", color="0.3", **style)


def drawable(labels: Sequence[str], limit: int | None = LONGEST_LABEL) -> tuple[list[str], dict[str, Any]]:
    """Labels of characters that an installed font has, those that none has given by their numbers; and their style."""
    families = {character: _font_of(character) for character in set().union(*labels)}
    drawn = []
    for label in labels:
        before = ("", *label)
        characters = [
            _draw(character, families[character], last) for last, character in zip(before, label, strict=False)
        ]
        drawn.append(_shorten(characters, limit))
    others = sorted({family for family in families.values() if family is not None} - {FONT})
    # A dollar sign begins no formula.
    return drawn, {"fontfamily": [FONT, *others], "fontsize": FONT_SIZE, "parse_math": False}


def _shorten(characters: list[str], limit: int | None) -> str:
    if limit is None or sum(map(len, characters)) <= limit:
        return "".join(characters)
    while sum(map(len, characters)) > limit - 1:
        characters.pop()
    return "".join(characters) + "…"


def _draw(character: str, family: str | None, before: str) -> str:
    if family is not None:
        return character
    # Without a font that draws what they modify, these are nothing to be missed; on a dotted circle they are all.
    missed = before == "◌" or unicodedata.category(character) not in ("Cf", "Mn")
    return number_of(character) if missed else ""


@lru_cache(maxsize=4096)
def _font_of(character: str) -> str | None:
    """The family of an installed font that has a character, matplotlib's own before others."""
    fonts = sorted(font_manager.fontManager.ttflist, key=lambda font: (font.name != FONT, font.name))
    for font in fonts:
        # This one has a box for everything.
        if not font.name.startswith("Last Resort") and ord(character) in _characters_of(font.fname):
            return font.name
    return None


@lru_cache
def _characters_of(file: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
