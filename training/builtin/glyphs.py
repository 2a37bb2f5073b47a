"""The built-in captioning data: letters drawn with the DejaVu fonts, captioned by their names in Unicode.

Nothing is downloaded: matplotlib contains the fonts, and Python the names.
"""

import hashlib
import io
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from datasets.fingerprint import Hasher
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

# The bold faces are left out, as breve and caron look the same in them at this size, and so is the italic one, which
# draws a Cyrillic i as a Latin u.
FACES = ("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif")

SIZES = {"train": 20_000, "validation": 1_000, "test": 1_000}
MIN_IMAGE_SIZE = 32

# Part of every cache key: raise it whenever the same arguments give other rows than before.
FORMAT_VERSION = 1

_SPLITS = tuple(SIZES)
_HELD_OUT_PERCENT = 12  # of the letters with marks, for each of the splits but the first
_NAME = re.compile(r"(?:LATIN|GREEK|CYRILLIC) (?:SMALL|CAPITAL) LETTER .+")
_MIN_PARTNERS = 12  # letters that bear a mark
_MIN_TRAIN_PARTNERS = 8  # those of them that are in the training split
_MAX_MARKS = 2

# Two drawings are alike if the ratios of their widths and of their heights are at most the second number (no more than
# the sizes in one data set differ), and if their blackness (0 to 1), once both are stretched to squares of one size,
# differs by at most the first number everywhere.
_ALIKE = 0.3
_ALIKE_RATIO = 1.2
_LARGE_SIZE = 96
_SHAPE_SIZE = 24


def load_glyphs(split: str = "train", *, image_size: int = 48, size: int | None = None, seed: int = 0) -> Dataset:
    """Loads drawings of letters and their captions, such as `latin small letter a with diaeresis`.

    A drawing is dark on light, in one of `FACES`, at a random place in the image. The font size is between 2/3 and 3/4
    of the image size, a range so narrow that small and capital letters of one shape still differ in height. The
    letters are those of the Latin, Greek and Cyrillic scripts that meet these conditions:

    - All faces have the letter. If it has no mark, they have both its capital and its small form.
    - Its name describes the drawing: Unicode decomposes a letter named `a with diaeresis` into an `a` and a mark, and
      does not decompose a letter whose name has no `with`. (The Cyrillic io, drawn as an e with diaeresis, is left
      out.)
    - No face draws it like another letter that precedes it in Unicode. Of A, Alpha and the Cyrillic A, the Latin A is
      kept.
    - It has at most two marks, at least twelve letters have each of them, and the letter without marks is kept too.

    The splits share no letter. `validation` and `test` hold only letters with marks, about one in eight of them each;
    the same letters without marks, and the same marks on at least eight other letters, are in `train`. So the captions
    of the held-out splits are new, but their words are not. A letter whose marks do not make it taller, such as the
    Czech ď with its caron beside it, is always in `train`.

    Row i depends only on i and the arguments except `size`, so a longer data set starts with the shorter one. The rows
    are written to the cache of `datasets`, where a later call with the same arguments finds them.

    Args:
        split: `train`, `validation` or `test`.
        image_size: The width and height of the images in pixels.
        size: The number of rows; None for the number in `SIZES`.
        seed: Another seed draws other rows. The letters of a split do not depend on it.

    Returns:
        A data set with the columns `image` (8-bit greyscale), `text` (the caption) and `character`.

    Raises:
        ValueError: An argument is out of range.
    """
    _check_drawn(split, image_size, seed)
    if size is None:
        size = SIZES[split]
    if size < 1:
        raise ValueError(f"`size` ({size}) must be at least 1, or None for {SIZES[split]:,}")

    def rows() -> Iterator[dict[str, Any]]:
        for index in range(size):
            yield _draw_row(glyph_characters(split), image_size, _row_generator(split, index, seed))

    versions = (FORMAT_VERSION, matplotlib.__version__, PIL.__version__)
    return Dataset.from_generator(
        rows,
        features=Features({"image": ImageFeature(), "text": Value("string"), "character": Value("string")}),
        fingerprint=Hasher.hash(("glyphs", *versions, split, image_size, size, seed)),
    )


@dataclass(frozen=True)
class GlyphDrawing:
    """How a row is drawn.

    Args:
        character: the letter.
        face: one of `FACES`.
        font_size: the size of the font, in pixels.
        image_size: the width and height of the image, in pixels.
        origin: the place of the letter's origin in the image, in pixels from the left and from the top.
    """

    character: str
    face: str
    font_size: int
    image_size: int
    origin: tuple[int, int]

    def draw(self, character: str | None = None) -> Image.Image:
        """Draws the letter, or another one in the same face and size at the same origin."""
        canvas = _draw_canvas(character or self.character, self.face, self.font_size)
        image = Image.new("L", (self.image_size, self.image_size), 255)
        left, top = self.origin
        image.paste(0, (left - self.font_size, top - 2 * self.font_size), canvas)
        return image


def glyph_drawing(split: str, index: int, *, image_size: int = 48, seed: int = 0) -> GlyphDrawing:
    """Returns how a row of `load_glyphs` with the same arguments is drawn; `index` is its number, from 0.

    Raises:
        ValueError: An argument is out of range.
    """
    _check_drawn(split, image_size, seed)
    return _choose_drawing(glyph_characters(split), image_size, _row_generator(split, index, seed))


def base_letter(caption: str) -> str:
    """Returns a caption without its marks: `latin small letter a` for `latin small letter a with diaeresis`."""
    return caption.partition(" with ")[0]


def glyph_characters(split: str) -> tuple[str, ...]:
    """Returns the letters of a split in the order of their code points.

    Args:
        split: `train`, `validation` or `test`.

    Raises:
        ValueError: There is no such split.
    """
    _check_split(split)
    return _split_characters()[split]


def _check_split(split: str) -> None:
    if split not in SIZES:
        raise ValueError(f"`split` ({split!r}) must be one of {', '.join(map(repr, SIZES))}")


def _check_drawn(split: str, image_size: int, seed: int) -> None:
    _check_split(split)
    if image_size < MIN_IMAGE_SIZE:
        raise ValueError(f"`image_size` ({image_size}) must be at least {MIN_IMAGE_SIZE}; smaller images lose marks")
    if seed < 0:
        raise ValueError(f"`seed` ({seed}) must not be negative")


# Rows


def _row_generator(split: str, index: int, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, _SPLITS.index(split), index])


def _draw_row(characters: tuple[str, ...], image_size: int, rng: np.random.Generator) -> dict[str, Any]:
    drawing = _choose_drawing(characters, image_size, rng)
    file = io.BytesIO()
    drawing.draw().save(file, "PNG", compress_level=1)
    text = _caption(drawing.character)
    return {"image": {"bytes": file.getvalue(), "path": None}, "text": text, "character": drawing.character}


def _choose_drawing(characters: tuple[str, ...], image_size: int, rng: np.random.Generator) -> GlyphDrawing:
    character = characters[rng.integers(len(characters))]
    face = FACES[rng.integers(len(FACES))]
    font_size = int(rng.integers(image_size * 2 // 3, image_size * 3 // 4 + 1))
    ink_left, ink_top, ink_right, ink_bottom = _ink_box(_draw_canvas(character, face, font_size))
    # The outermost pixels stay blank.
    left = int(rng.integers(1, image_size - (ink_right - ink_left)))
    top = int(rng.integers(1, image_size - (ink_bottom - ink_top)))
    origin = (left - ink_left + font_size, top - ink_top + 2 * font_size)
    return GlyphDrawing(character, face, font_size, image_size, origin)


def _caption(character: str) -> str:
    return unicodedata.name(character).lower()


def _draw_ink(character: str, face: str, font_size: int) -> Image.Image:
    """Draws a letter light on dark, in an image of the size of its ink."""
    canvas = _draw_canvas(character, face, font_size)
    return canvas.crop(_ink_box(canvas))


# Each canvas is used twice: it is measured first and pasted then.
@lru_cache(maxsize=1)
def _draw_canvas(character: str, face: str, font_size: int) -> Image.Image:
    canvas = Image.new("L", (3 * font_size, 3 * font_size))
    # The origin is in the middle, as a letter may extend to the left of it and below the line.
    ImageDraw.Draw(canvas).text((font_size, 2 * font_size), character, 255, _font(face, font_size), anchor="ls")
    return canvas


def _ink_box(canvas: Image.Image) -> tuple[int, int, int, int]:
    box = canvas.getbbox()
    assert box is not None
    return box


@cache
def _font(face: str, font_size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_font_path(face), font_size, layout_engine=ImageFont.Layout.BASIC)


def _font_path(face: str) -> str:
    return str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf"))


# Letters and splits


@cache
def _split_characters() -> Mapping[str, tuple[str, ...]]:
    characters = _choose_characters()
    number = sum(1 for character in characters if _marks(character)) * _HELD_OUT_PERCENT // 100
    candidates = [character for character in characters if _marks(character) and _is_taller(character)]
    # In the order of a hash that, unlike Python's own, is the same in every process and on every machine.
    candidates.sort(key=lambda character: hashlib.blake2b(character.encode()).digest())
    partners = _count_marks(characters)
    held_out = []
    for character in candidates:
        if all(partners[mark] > _MIN_TRAIN_PARTNERS for mark in _marks(character)):
            held_out.append(character)
            partners.subtract(_marks(character))
    splits = {split: held_out[k * number : (k + 1) * number] for k, split in enumerate(_SPLITS[1:])}
    splits[_SPLITS[0]] = [c for c in characters if not any(c in members for members in splits.values())]
    return {split: tuple(sorted(members)) for split, members in splits.items()}


def _is_taller(character: str) -> bool:
    """Returns whether the marks are above or below the letter in every face."""
    letter = _decompose(character)[0]
    heights = ([_draw_ink(drawn, face, _LARGE_SIZE).height for drawn in (character, letter)] for face in FACES)
    return all(height > alone for height, alone in heights)


def _choose_characters() -> list[str]:
    drawn = set.intersection(*(set(map(chr, FT2Font(_font_path(face)).get_charmap())) for face in FACES))
    characters = _drop_alike([character for character in sorted(drawn) if _is_well_named(character, drawn)])
    letters = {character for character in characters if not _marks(character)}
    compositions = [c for c in characters if _decompose(c)[0] in letters and 1 <= len(_marks(c)) <= _MAX_MARKS]
    partners = _count_marks(compositions)
    # Dropping a letter for one of its marks may leave too few letters with its other mark.
    while min(partners.values()) < _MIN_PARTNERS:
        compositions = [c for c in compositions if all(partners[mark] >= _MIN_PARTNERS for mark in _marks(c))]
        partners = _count_marks(compositions)
    return sorted([*letters, *compositions])


def _is_well_named(character: str, drawn: set[str]) -> bool:
    name = unicodedata.name(character, "")
    if not _NAME.fullmatch(name):
        return False
    if " WITH " in name:
        return name.startswith(f"{unicodedata.name(_decompose(character)[0])} WITH ")
    other_case = character.swapcase()
    return unicodedata.normalize("NFKD", character) == character != other_case and other_case in drawn


def _decompose(character: str) -> str:
    return unicodedata.normalize("NFD", character)


def _marks(character: str) -> list[str]:
    marks = unicodedata.name(character).partition(" WITH ")[2]
    return marks.split(" AND ") if marks else []


def _count_marks(characters: Sequence[str]) -> Counter[str]:
    return Counter(mark for character in characters for mark in _marks(character))


def _drop_alike(characters: Sequence[str]) -> list[str]:
    """Returns the letters without those that one of the faces draws like an earlier one."""
    inks = [[_draw_ink(character, face, _LARGE_SIZE) for character in characters] for face in FACES]
    sizes = np.log([[ink.size for ink in row] for row in inks])  # (face, letter, 2)
    shapes = np.array([[_shape(ink) for ink in row] for row in inks])  # (face, letter, pixel)
    kept: list[int] = []
    for index in range(len(characters)):
        known = np.array(kept, dtype=int)
        gaps = np.abs(sizes[:, known] - sizes[:, [index]]).max(-1)  # (face, kept)
        face, near = np.nonzero(gaps <= math.log(_ALIKE_RATIO))
        differences = np.abs(shapes[face, known[near]] - shapes[face, index]).max(-1)
        if differences.min(initial=math.inf) > _ALIKE:
            kept.append(index)
    return [characters[index] for index in kept]


def _shape(ink: Image.Image) -> np.ndarray:
    square = ImageOps.expand(ink.resize((_SHAPE_SIZE, _SHAPE_SIZE), Image.Resampling.BOX), border=1)
    # Blurred, as a shift by half a pixel is no difference.
    return np.asarray(square.filter(ImageFilter.BoxBlur(1)), dtype=np.float32).ravel() / 255
