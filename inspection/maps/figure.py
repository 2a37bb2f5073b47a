"""Attention maps as matplotlib figures."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image

from .tokens import code_point

FONT = "DejaVu Sans"  # matplotlib's own
FONT_SIZE = 9
# Inches: the usual size of a cell, and the least and largest length of the longer side of the grid.
CELL, LEAST, MOST = 0.22, 2.4, 10.0
# Characters of a label, and of a title over an image, which the width of a panel limits.
LONGEST_LABEL = 24
LONGEST_TITLE = 17
COLUMNS = 6
# The most queries that a figure shows over an image.
MOST_PANELS = 35
HEAT = (0.85, 0.1, 0.3)


def draw_map(matrix: np.ndarray, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """Draws weights as a grid with the keys on top. For a long text it leaves some labels out.

    Args:
        matrix: the weights, (queries, keys).
        queries: label of each row.
        keys: label of each column.
        title: title of the figure.
    """
    height, width = matrix.shape
    cell = min(max(CELL, LEAST / max(height, width)), MOST / max(height, width))
    # A minimum, because beside a much longer text the other side would shrink to a line.
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
    matrix: np.ndarray, queries: Sequence[str], image: Image.Image, grid: tuple[int, int], title: str
) -> Figure:
    """Draws a panel for each query, with its weights over the image.

    The title of a panel is the query and its largest weight. All panels share one colour scale.

    Args:
        matrix: the weights, (queries, cells of the grid).
        queries: label of each row.
        image: the image.
        grid: height and width of the grid.
        title: title of the figure.
    """
    pixels = np.asarray(image.convert("RGB"))
    columns = min(COLUMNS, len(queries) + 1)
    rows = math.ceil((len(queries) + 1) / columns)
    side = 1.7
    tall = min(max(image.height / image.width, 0.4), 2.5)
    figure = Figure(figsize=(max(columns * side, 5.0), rows * (side * tall + 0.3) + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for place, axes in enumerate(panels):
        axes.set_axis_off()
        if place > len(queries):
            continue
        axes.imshow(pixels)
        name, largest = "the image", ""
        if place:
            weights = matrix[place - 1].reshape(grid)
            draw_heat(axes, weights / (matrix.max() or 1), image.size, interpolation="bilinear")
            name, largest = queries[place - 1], f" ({weights.max():.0%})"
        (label,), style = drawable([name], limit=LONGEST_TITLE)
        axes.set_title(label + largest, **style)
    set_title(figure, title)
    return figure


def draw_heat(axes: Axes, shares: np.ndarray, size: tuple[int, int], interpolation: str) -> None:
    """Draws weights over an image as a translucent red layer.

    Args:
        axes: the axes that show the image.
        shares: the weights as shares of the largest weight, (rows, columns).
        size: width and height of the image in pixels.
        interpolation: matplotlib's name for how to fill the pixels between the cells.
    """
    width, height = size
    heat = np.concatenate([np.broadcast_to(HEAT, (*shares.shape, 3)), 0.85 * shares[..., None]], axis=-1)
    axes.imshow(heat, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation=interpolation)


def set_title(figure: Figure, title: str) -> None:
    """Puts a title above a figure, wrapped into as many lines as it needs."""
    # As wide as the figure allows, at about half a font size a character.
    width = int(figure.get_figwidth() * 72 / (0.55 * FONT_SIZE)) - 2
    lines, style = drawable(wrap(title, width), limit=None)
    figure.suptitle("\n".join(lines), x=0.01, ha="left", color="0.3", **style)


def drawable(labels: Sequence[str], limit: int | None = LONGEST_LABEL) -> tuple[list[str], dict[str, Any]]:
    """Returns labels that the installed fonts can draw, and the text style that draws them.

    A character that no font has becomes its code point.

    Args:
        labels: the labels.
        limit: the most characters of a label; longer ones are cut. None for no limit.
    """
    families = {character: _font_of(character) for character in set().union(*labels)}
    drawn = []
    for label in labels:
        before = ("", *label)
        characters = [
            _draw(character, families[character], last) for last, character in zip(before, label, strict=False)
        ]
        drawn.append(_shorten(characters, limit))
    others = sorted({family for family in families.values() if family is not None} - {FONT})
    # A dollar sign must not start a formula.
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
    # A format character or combining mark may be left out, unless it is on a dotted circle and so all that is shown.
    is_needed = before == "◌" or unicodedata.category(character) not in ("Cf", "Mn")
    return code_point(character) if is_needed else ""


@lru_cache(maxsize=4096)
def _font_of(character: str) -> str | None:
    """Returns the family of an installed font that has a character, preferring matplotlib's own; None if none has."""
    fonts = sorted(font_manager.fontManager.ttflist, key=lambda font: (font.name != FONT, font.name))
    for font in fonts:
        # Last Resort has a placeholder box for every character.
        if not font.name.startswith("Last Resort") and ord(character) in _characters_of(font.fname):
            return font.name
    return None


@lru_cache
def _characters_of(file: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()
