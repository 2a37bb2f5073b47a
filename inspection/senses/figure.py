"""The figure of a word's uses: its vectors by cluster, example sentences, and how contextual each layer is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..maps.figure import FONT_SIZE, drawable, set_title
from ..maps.tokens import printable
from .occurrences import Occurrence
from .senses import WordSenses

COLOURS = ("#1f6fb4", "#d9541e", "#2a9d4e", "#8a4fbf", "#b8860b", "#c23b80")
# Inches of a line of text; the most characters of a line, and of a word in it.
LINE, LINE_LENGTH, WORD_LENGTH = 0.19, 78, 24


def example_line(example: Occurrence, width: int = LINE_LENGTH) -> str:
    """Returns an occurrence as one line with the word in brackets; a longer text is cut around the word.

    Args:
        example: the occurrence.
        width: the most characters of the line.
    """
    if _is_wide(example.text):
        width //= 2
    word, room = printable(example.text[example.start : example.end]), width - 6
    if len(word) > WORD_LENGTH:
        word = word[: WORD_LENGTH - 1] + "…"
    before, after = printable(example.text[: example.start]), printable(example.text[example.end :])
    before, after = (("" if part == "␣" * len(part) else part) for part in (before, after))
    gap = " " if example.text[: example.start].endswith(" ") else ""
    tail = " " if example.text[example.end :].startswith(" ") else ""
    before, after = before.strip(" "), after.strip(" ")
    room -= len(word) + len(gap) + len(tail)
    left = max(room // 2, room - len(after))
    if len(before) > left:
        before = "…" + before[len(before) - left + 1 :]
    right = room - len(before)
    if len(after) > right:
        after = after[: right - 1] + "…"
    return f"{before}{gap}[{word}]{tail}{after}"


def title_of(found: WordSenses) -> str:
    """Returns the title of a figure: the word, the layer and the number of contexts."""
    # The word is not first, because a word written from right to left would reverse the line.
    return f"{len(found.occurrences)} contexts of {found.word}, layer {found.layer}"


def draw_senses(found: WordSenses, title: str = "") -> Figure:
    """Draws the vectors on their two main axes, the examples of each cluster, and how contextual each layer is.

    Args:
        found: the uses of a word.
        title: title of the figure; `title_of` makes one if it is empty.
    """
    lines = sum(len(sense.examples) + 2 for sense in found.senses) + 2
    above, below = max(lines * LINE, 3.4), 2.1
    figure = Figure(figsize=(11.6, above + below + 1.2))
    height = figure.get_figheight()
    clouds = figure.add_axes((0.063, (below + 0.65) / height, 0.355, (above - 0.1) / height))
    texts = figure.add_axes((0.45, (below + 0.65) / height, 0.54, (above - 0.1) / height))
    share = figure.add_axes((0.063, 0.5 / height, 0.355, (below - 0.75) / height))
    similar = figure.add_axes((0.5, 0.5 / height, 0.48, (below - 0.75) / height))
    _draw_clouds(clouds, found)
    _draw_examples(texts, found, above - 0.1)
    layers = range(len(found.layers))
    (name,), style = drawable([found.word])
    for axes, rows in (
        (share, {"between its contexts": "share", f"mean of {found.words} other words": "mean_share"}),
        (similar, {"self-similarity": "self_similarity", "two different words": "anisotropy"}),
    ):
        for (label, attribute), mark in zip(rows.items(), ("o-", "s--"), strict=True):
            axes.plot(layers, [getattr(layer, attribute) for layer in found.layers], mark, label=label, markersize=4)
        axes.set_xticks(layers[:: max(len(layers) // 12, 1)])
        axes.set_xlabel("layer (0: embeddings)", fontsize=FONT_SIZE)
        axes.tick_params(labelsize=FONT_SIZE - 1)
        # Of a static vector the lines are at 0 and 1, where the frame would hide them.
        axes.set_ylim(min(-0.04, axes.get_ylim()[0]), 1.04)
        axes.legend(fontsize=FONT_SIZE - 1, framealpha=0.7)
    share.set_title(f"variance of the vectors of {name}", **style)
    similar.set_title("mean cosine of two vectors", **style)
    set_title(figure, title or title_of(found))
    return figure


def _draw_clouds(axes: Axes, found: WordSenses) -> None:
    points, labels, shares = found.clusters.axes, found.clusters.labels, found.clusters.axis_shares
    # Static vectors vary along no axis, or along one only.
    across, up = (points[:, axis] if points.shape[1] > axis else 0 * labels for axis in range(2))
    for number, sense in enumerate(found.senses):
        chosen = labels == number
        axes.scatter(
            across[chosen],
            up[chosen],
            s=14,
            color=COLOURS[number % len(COLOURS)],
            marker="os^Dvx"[number // len(COLOURS) % 6],
            label=f"use {number + 1} ({sense.occurrences})",
        )
    axes.legend(fontsize=FONT_SIZE - 1)
    axes.tick_params(labelsize=FONT_SIZE - 1)
    names = [
        f"axis {axis + 1} ({shares[axis] if len(shares) > axis else 0.0:.0%} of the variance)" for axis in range(2)
    ]
    axes.set_xlabel(names[0], fontsize=FONT_SIZE)
    axes.set_ylabel(names[1], fontsize=FONT_SIZE)


def _draw_examples(axes: Axes, found: WordSenses, inches: float) -> None:
    axes.set_axis_off()
    place = 0

    def write(line: str, colour: str, weight: str = "normal") -> None:
        nonlocal place
        # A character that no font has is drawn as its code point, which is longer.
        (text,), style = drawable([line], limit=LINE_LENGTH + 4)
        up = 1 - (place + 0.5) * LINE / inches
        label = axes.text(0, up, text, color=colour, weight=weight, va="center", transform=axes.transAxes, **style)
        # The limit in characters may not be enough, because some letters are wider than others.
        share = axes.get_window_extent().width / label.get_window_extent().width
        if share < 1:
            label.set_text(text[: int(share * len(text)) - 1] + "…")
        place += 1

    nearest = [word for word, _ in found.static_neighbours]
    write(_fitting("word2vec's neighbours: ", nearest), "0.35")
    for number, sense in enumerate(found.senses):
        place += 1
        colour = COLOURS[number % len(COLOURS)]
        heading = f"use {number + 1} ({sense.occurrences})"
        write(_fitting(f"{heading}, more often with: ", sense.companions) if sense.companions else heading, colour)
        for example in sense.examples:
            write(example_line(example), "0.1")


def _fitting(start: str, words: Sequence[str], width: int = LINE_LENGTH) -> str:
    """Returns a line with as many of the words as fit, but at least one; long words are shortened."""
    if any(map(_is_wide, words)):
        width //= 2
    shown = [printable(word if len(word) <= WORD_LENGTH else word[: WORD_LENGTH - 1] + "…") for word in words]
    while len(shown) > 1 and len(start + ", ".join(shown)) > width:
        shown.pop()
    return start + ", ".join(shown)


def _is_wide(text: str) -> bool:
    return any(unicodedata.east_asian_width(character) in "WF" for character in text)
