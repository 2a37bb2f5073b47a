"""Measuring how much of a captioner's attention lies on the marks of letters, whose place the built-in glyphs know."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..inspection.faithfulness.glyph_marks import (
    EVEN,
    MOST,
    OTHER,
    MarkedImage,
    MarkFigures,
    mark_pixels,
    measure_marks,
    plot_marks,
    receptive_field,
)
from ..inspection.faithfulness.report import Estimate, estimate
from ..loading import for_attention, load_network, require_ending
from ..training.builtin.glyphs import SIZES, GlyphDrawing, glyph_drawing

SHOWN = 5
# Letters that lose their dot where they get a mark above.
_DOTLESS = {"i": "\N{LATIN SMALL LETTER DOTLESS I}", "j": "\N{LATIN SMALL LETTER DOTLESS J}"}


class MarksFound(NamedTuple):
    """The results of `inspect_marks`.

    Attributes:
        examples: the letters.
        figures: what was measured of them.
        field: height and width, in pixels, that a place in the middle of the feature map sees.
        grid: height and width of the feature map.
    """

    examples: list[MarkedImage]
    figures: MarkFigures
    field: tuple[int, int]
    grid: tuple[int, int]


def inspect_marks(
    model: str | Path,
    output: str | Path,
    mark: str = "DIAERESIS",
    *,
    examples: int = 100,
    layer: int = -1,
    head: int | str = "mean",
    seed: int = 0,
) -> MarksFound:
    """Measures how much of a captioner's attention lies on a mark while it names it, and draws some examples.

    Args:
        model: folder of a run or of a model, or a Hub id, of a captioner that was trained on the built-in glyphs.
        output: file of the picture.
        mark: the mark's name in the captions, in any case.
        examples: number of drawings of the test split to look at; all of them if there are fewer.
        layer: the layer to look at, from 0; -1 is the last.
        head: the head to look at, from 0, or "mean" over all heads.
        seed: seed of what other drawings each one is compared with.

    Raises:
        ValueError: if there is no such model or mark, the model is no captioner that attends, or an argument is out
            of range.
    """
    file = Path(output)
    require_ending(file)
    if examples < 1:
        raise ValueError(f"`examples` ({examples}) must be at least 1")
    chosen = marked_images(mark, examples)
    network, processor = load_network(model, for_attention)
    if not hasattr(network, "feature_grid"):
        raise ValueError(f"`model` ({model}) is a {type(network).__name__}, which is no captioner of ours")
    figures = measure_marks(network, processor, chosen, layer=layer, head=head, seed=seed)
    size = processor(images=chosen[0].image, return_tensors="pt")["pixel_values"].shape[-2:]
    seen = receptive_field(network, *size)
    # One of each letter first.
    firsts = {example.character: number for number, example in reversed(list(enumerate(chosen)))}
    rest = [number for number in range(len(chosen)) if number not in firsts.values()]
    plot_marks(chosen, figures, [*sorted(firsts.values()), *rest][:SHOWN], file)
    rows, columns = (int(part[len(part) // 2].sum()) for part in seen)
    return MarksFound(chosen, figures, (rows, columns), (len(seen[0]), len(seen[1])))


def marked_images(mark: str, number: int, split: str = "test") -> list[MarkedImage]:
    """Returns the first drawings of letters with a mark in a split of the glyphs, and where the mark is in each.

    Drawings in which the letter is not a part of the letter with the mark are left out (a horn changes its shape).

    Raises:
        ValueError: if no letter has the mark; the error names the marks that letters have.
    """
    found: list[MarkedImage] = []
    marks: Counter[str] = Counter()
    for drawing, caption, name in _marked_drawings(split):
        marks[name] += 1
        if name == mark.lower() and (example := _locate(drawing, caption, name)) is not None:
            found.append(example)
            if len(found) == number:
                return found
    if not found:
        known = ", ".join(sorted(each.upper() for each in marks))
        raise ValueError(f"`mark` ({mark!r}) must be a mark of the glyphs of the {split} split: {known}")
    return found


def _marked_drawings(split: str) -> Iterator[tuple[GlyphDrawing, str, str]]:
    for index in range(SIZES[split]):
        drawing = glyph_drawing(split, index)
        caption = unicodedata.name(drawing.character).lower()
        name = caption.partition(" with ")[2]
        if name and " letter " in caption and len(unicodedata.normalize("NFD", drawing.character)) == 2:
            yield drawing, caption, name


def _locate(drawing: GlyphDrawing, caption: str, mark: str) -> MarkedImage | None:
    letter = unicodedata.normalize("NFD", drawing.character)[0]
    image = drawing.draw()
    candidates = [
        (base, mark_pixels(image, base)) for base in map(drawing.draw, (letter, _DOTLESS.get(letter, letter)))
    ]
    masks = [(base, mask) for base, mask in candidates if mask is not None and mask.any()]
    if not masks:
        return None
    # The one with the most ink: a letter that keeps its dot has it below the mark too.
    base, pixels = min(masks, key=lambda each: int(each[1].sum()))
    begin, end = caption.index(" letter ") + 1, caption.index(" with ")
    base_start = begin + len("letter ")
    spans = {"mark": (len(caption) - len(mark), len(caption)), "letter": (begin, begin + len("letter"))}
    return MarkedImage(image, base, pixels, caption, spans | {"base": (base_start, end)}, mark, drawing.character)


def mark_lines(found: MarksFound) -> list[str]:
    """Describes the results."""
    examples, figures = found.examples, found.figures
    mark = examples[0].mark.upper()
    letters = "".join(sorted({example.character for example in examples}))
    names = {
        "mark": f"saying {mark}",
        "letter": "saying LETTER",
        "base": "saying the letter's name",
        OTHER: f"another drawing's, for {mark}",
        EVEN: "even weights",
        MOST: "most possible",
    }
    width = max(map(len, names.values()))
    lines = [
        f"{len(examples)} drawings of {letters}; {mark} is the model's own choice in {figures.right.mean():.0%}",
        f"{'attention'.ljust(width)}  on the mark's pixels    on places it touches      largest weight there",
    ]
    for name, text in names.items():
        pixels, places, largest = figures.shares[name].T
        share = estimate(list(largest))
        columns = (
            _share(estimate(list(pixels))),
            _share(estimate(list(places))),
            f"{share.mean:.0%}" if share.count else "none",
        )
        lines.append(f"{text.ljust(width)}  {columns[0].ljust(22)}  {columns[1].ljust(24)}  {columns[2]}")
    means = {name: float(each.mean()) for name, each in figures.probability.items()}
    lines += [
        f"Probability of {mark}: {means['is']:.3g}; with the mark erased {means['mark']:.3g}, with as many pixels of "
        f"the letter erased {means['letter']:.3g}",
        f"A place in the middle of the {found.grid[0]} × {found.grid[1]} sees {found.field[0]} × {found.field[1]} "
        "pixels.",
    ]
    return lines


def _share(value: Estimate) -> str:
    # A single drawing has no other one whose map it could be compared with.
    if not value.count:
        return "none"
    return f"{value.mean:.1%} [{value.low:.1%}, {value.high:.1%}]"
