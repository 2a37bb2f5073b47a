import io
import unicodedata
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import datasets
import matplotlib
import numpy as np
import pytest
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from regard.training.builtin.glyphs import (
    FACES,
    SIZES,
    _draw_row,
    base_letter,
    glyph_characters,
    glyph_drawing,
    load_glyphs,
)

HELD_OUT = ("validation", "test")
FONTS = {face: Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf") for face in FACES}


def caption(character: str) -> str:
    return unicodedata.name(character).lower()


def marks(character: str) -> list[str]:
    _, with_marks, names = caption(character).partition(" with ")
    return names.split(" and ") if with_marks else []


def ink(image: Image.Image) -> np.ndarray:
    """Where a row of the data set is dark."""
    return 255 - np.asarray(image).astype(int)


def drawn(character: str, face: str, font_size: int = 64) -> np.ndarray:
    """An independent drawing of a letter, cut to its ink."""
    canvas = Image.new("L", (4 * font_size, 4 * font_size))
    font = ImageFont.truetype(str(FONTS[face]), font_size)
    ImageDraw.Draw(canvas).text((font_size, font_size), character, 255, font)
    return np.asarray(canvas.crop(canvas.getbbox())).astype(int)


def draw(character: str, image_size: int, index: int) -> Image.Image:
    """The image of a row that holds this letter."""
    row = _draw_row((character,), image_size, np.random.default_rng([3, index]))
    return Image.open(io.BytesIO(row["image"]["bytes"]))


@pytest.fixture(scope="module")
def splits():
    return {split: set(glyph_characters(split)) for split in SIZES}


@pytest.fixture(scope="module")
def letters(splits):
    return sorted(set.union(*splits.values()))


@pytest.fixture(scope="module")
def rows():
    return {split: load_glyphs(split, size=size) for split, size in [("train", 700), *((s, 90) for s in HELD_OUT)]}


# Letters


def test_captions_are_names(rows, splits):
    for split, data in rows.items():
        assert data["text"][:] == [caption(character) for character in data["character"]]
        assert set(data["character"]) <= splits[split]
        assert len(set(data["character"])) > 0.6 * min(len(data), len(splits[split]))


def test_every_face_has_every_letter(letters):
    for path in FONTS.values():
        assert set(map(ord, letters)) <= set(TTFont(path).getBestCmap())


def test_names_describe_what_is_drawn(letters):
    for letter in letters:
        parts = unicodedata.normalize("NFKD", letter)
        assert (len(parts) > 1) == bool(marks(letter))
        assert caption(parts[0]) == base_letter(caption(letter))
        assert parts[0] in letters
        assert all(unicodedata.combining(part) for part in parts[1:])
        assert len(marks(letter)) <= 2
    assert {"A", "é", "ω", "Ж"} <= set(letters)
    assert not {"ё", "ŉ", "ſ", "ø", "Ǆ"} & set(letters)


def test_no_two_letters_are_drawn_alike(letters):
    for face in FACES:
        drawings: dict[tuple[tuple[int, ...], bytes], str] = {}
        for letter in letters:
            drawing = drawn(letter, face)
            other = drawings.setdefault((drawing.shape, drawing.tobytes()), letter)
            assert other == letter, f"{face} draws {other!r} and {letter!r} alike"


def test_letters_that_only_size_or_place_tells_apart_are_one(letters):
    # In the Sans, l is an I that is 4% taller; in the Sans Mono, the Cyrillic U is a y upon the line.
    assert [letter for letter in "AΑАIlІyУуκк" if letter in letters] == ["A", "I", "y", "κ"]
    assert {"o", "O", "s", "S", "c", "C", "v", "V", "Ж", "ж"} <= set(letters)


@pytest.mark.parametrize("image_size", [32, 48, 51, 64, 99])
def test_small_and_capital_letters_differ_in_height(image_size):
    heights: dict[str, list[int]] = {"xvz": [], "XVZ": []}
    for index in range(400):
        for alphabet, found in heights.items():
            letter = alphabet[index % 3]
            found.append(np.ptp(np.nonzero(ink(draw(letter, image_size, index)).any(1))) + 1)
    assert max(heights["xvz"]) < min(heights["XVZ"])
    assert len(set(heights["XVZ"])) > 1


# Splits


def test_splits_share_no_letter(splits):
    for one, other in combinations(splits, 2):
        assert not splits[one] & splits[other]


def test_held_out_letters_are_new_compositions_of_known_parts(splits):
    train = splits["train"]
    words = {word for letter in train for word in caption(letter).split()}
    partners = Counter(mark for letter in train for mark in marks(letter))
    captions = {caption(letter) for letter in train}
    compositions = sum(1 for members in splits.values() for letter in members if marks(letter))
    for split in HELD_OUT:
        assert 0.1 < len(splits[split]) / compositions < 0.15
        for letter in splits[split]:
            assert set(caption(letter).split()) <= words
            assert marks(letter)
            assert min(partners[mark] for mark in marks(letter)) >= 8
            assert base_letter(caption(letter)) in captions


def test_every_mark_is_on_a_dozen_letters(letters):
    assert min(Counter(mark for letter in letters for mark in marks(letter)).values()) >= 12


def test_base_letter():
    assert base_letter("latin small letter a with diaeresis") == "latin small letter a"
    assert base_letter("greek small letter omega with psili and varia") == "greek small letter omega"
    assert base_letter("latin capital letter eth") == "latin capital letter eth"


# Images


def test_images_hold_the_whole_letter(rows):
    for data in rows.values():
        assert data.features["image"] == datasets.Image()
        for row in data:
            image = row["image"]
            assert (image.size, image.mode) == ((48, 48), "L")
            dark = ink(image)
            assert dark.max() > 128
            assert not dark[[0, -1]].any()
            assert not dark[:, [0, -1]].any()


@pytest.mark.parametrize("image_size", [32, 51])
def test_every_letter_fits(image_size, letters):
    for face in FACES:
        for letter in letters:
            height, width = drawn(letter, face, image_size * 3 // 4).shape
            assert max(height, width) <= image_size - 2, f"{letter!r} in {face}"


def test_images_are_the_faces_drawings():
    found = set()
    for index in range(60):
        dark = ink(draw("ǧ", 48, index))
        tops, lefts = np.nonzero(dark.any(1))[0], np.nonzero(dark.any(0))[0]
        cut = dark[tops[0] : tops[-1] + 1, lefts[0] : lefts[-1] + 1]
        same = [
            (face, size) for face in FACES for size in range(32, 37) if np.array_equal(drawn("ǧ", face, size), cut)
        ]
        assert len(same) == 1
        found.update(same)
    assert {face for face, _ in found} == set(FACES)
    assert {size for _, size in found} == set(range(32, 37))


def test_places_reach_every_side():
    boxes = [draw("o", 48, index) for index in range(200)]
    edges = np.array([Image.fromarray(ink(image).astype(np.uint8)).getbbox() for image in boxes])
    assert (edges.min(0)[:2] <= 3).all()
    assert (edges.max(0)[2:] >= 45).all()


# Rows


def same_rows(one: datasets.Dataset, other: datasets.Dataset) -> bool:
    def raw(data: datasets.Dataset) -> list[dict]:
        return data.cast_column("image", datasets.Image(decode=False)).to_list()

    return raw(one) == raw(other)


def test_rows_depend_on_their_number_and_not_on_the_size(rows):
    assert same_rows(load_glyphs(size=99), rows["train"].select(range(99)))


def test_rows_can_be_drawn_again(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    again = load_glyphs("test", size=90)
    assert all(str(tmp_path) in file["filename"] for file in again.cache_files)
    assert same_rows(again, rows["test"])


def test_a_second_call_reads_the_cache(rows, monkeypatch):
    monkeypatch.setattr("regard.training.builtin.glyphs._draw_row", None)
    assert same_rows(load_glyphs("test", size=90), rows["test"])


def test_how_a_row_is_drawn_is_told():
    for split, options in (("train", {}), ("test", {"image_size": 37, "seed": 2})):
        for index, row in enumerate(load_glyphs(split, size=40, **options)):
            drawing = glyph_drawing(split, index, **options)
            assert drawing.character == row["character"]
            np.testing.assert_array_equal(drawing.draw(), row["image"])


def test_another_letter_is_drawn_in_the_place_of_one():
    drawings = (glyph_drawing("test", index) for index in range(200))
    drawing = next(drawing for drawing in drawings if drawing.character == "Ḧ")
    full, base = ink(drawing.draw()), ink(drawing.draw("H"))
    # The letter itself is where it was, and nothing is below it that was not there.
    assert (full >= base).all()
    np.testing.assert_array_equal(np.nonzero(full.any(1))[0][-1], np.nonzero(base.any(1))[0][-1])
    assert np.nonzero(full.any(1))[0][0] < np.nonzero(base.any(1))[0][0]


def test_seed_and_image_size_change_the_rows(rows):
    other = load_glyphs("test", size=90, seed=1)
    assert other["text"][:] != rows["test"]["text"][:]
    assert load_glyphs("test", size=3, image_size=37)[0]["image"].size == (37, 37)
    images = [load_glyphs("test", size=13, seed=seed)[0]["image"].tobytes() for seed in range(4)]
    assert all(one != two for one, two in pairwise(images))


def test_default_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets.Dataset, "from_generator", lambda rows, **options: asked.append(options))
    for split in SIZES:
        load_glyphs(split)
        load_glyphs(split, size=SIZES[split])
    fingerprints = [options["fingerprint"] for options in asked]
    assert fingerprints[::2] == fingerprints[1::2]
    assert len(set(fingerprints)) == len(SIZES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, r"^`split` \('dev'\) must be one of 'train', 'validation', 'test'$"),
        ({"image_size": 31}, r"^`image_size` \(31\) must be at least 32"),
        ({"size": 0}, r"^`size` \(0\) must be at least 1, or None for 20,000$"),
        ({"seed": -1}, r"^`seed` \(-1\) must not be negative$"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_glyphs(**arguments)


def test_bad_arguments_of_a_drawing():
    for arguments, message in (
        ({"split": "dev"}, "`split`"),
        ({"image_size": 31}, "`image_size`"),
        ({"seed": -1}, "`s"),
    ):
        with pytest.raises(ValueError, match=message):
            glyph_drawing(**{"split": "test", "index": 0, **arguments})


def test_unknown_split_has_no_characters():
    with pytest.raises(ValueError, match=r"^`split` \('dev'\)"):
        glyph_characters("dev")
