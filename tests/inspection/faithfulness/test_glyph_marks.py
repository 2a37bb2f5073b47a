"""Where the marks of letters are, and how much of a captioner's attention lies there."""

import itertools
import unicodedata
import warnings

import numpy as np
import pytest
import torch

from regard import RegardCaptionerConfig, RegardCaptionerForConditionalGeneration, make_captioner_processor
from regard.commands.inspect_marks import _locate as locate
from regard.commands.inspect_marks import inspect_marks, mark_lines, marked_images
from regard.inspection.faithfulness.glyph_marks import (
    cell_coverage,
    mark_pixels,
    mark_shares,
    measure_marks,
    receptive_field,
)
from regard.inspection.faithfulness.glyph_marks import erase_patch as erase
from regard.inspection.maps.attention_map import attention_map
from regard.tokenization.words import train_words
from regard.training.builtin.glyphs import FACES, GlyphDrawing
from tests.inspection.conftest import BACKBONE


def drawn(character: str) -> GlyphDrawing:
    return GlyphDrawing(character, FACES[0], 28, 48, (14, 34))


def mask_of(character: str) -> tuple[np.ndarray, np.ndarray]:
    """The mark's pixels, and the letter's."""
    drawing = drawn(character)
    base = drawing.draw(unicodedata.normalize("NFD", character)[0])
    mask = mark_pixels(drawing.draw(), base)
    assert mask is not None
    return mask, np.asarray(base) < 128


def parts_of(mask: np.ndarray) -> int:
    """The number of connected parts, by growing one after the other."""
    left, number = mask.copy(), 0
    while left.any():
        grown = np.zeros_like(left)
        grown[tuple(index[0] for index in np.nonzero(left))] = True
        while True:
            padded = np.pad(grown, 1)
            near = sum(
                padded[1 + down : padded.shape[0] - 1 + down, 1 + right : padded.shape[1] - 1 + right].astype(int)
                for down in (-1, 0, 1)
                for right in (-1, 0, 1)
            )
            wider = (near > 0) & left
            if (wider == grown).all():
                break
            grown = wider
        left &= ~grown
        number += 1
    return number


def test_two_dots_lie_above_the_letter():
    mask, letter = mask_of("ä")
    assert parts_of(mask) == 2
    assert np.nonzero(mask)[0].max() < np.nonzero(letter)[0].min()


def test_a_dot_below_lies_below():
    mask, letter = mask_of("ạ")
    assert parts_of(mask) == 1
    assert np.nonzero(mask)[0].min() > np.nonzero(letter)[0].max()


def test_a_letter_that_is_not_in_the_drawing_has_no_mark():
    assert mark_pixels(drawn("ä").draw(), drawn("W").draw()) is None


@pytest.mark.parametrize("mark", ["diaeresis", "Grave", "DOT BELOW"])
def test_marks_of_the_glyphs(mark):
    found = marked_images(mark, 12)
    assert len(found) == 12
    for example in found:
        image, base = np.asarray(example.image), np.asarray(example.base)
        assert (image[example.mask] < base[example.mask]).all()
        assert (image[~example.mask] > base[~example.mask].astype(int) - 64).all()
        words = {name: example.caption[start:end] for name, (start, end) in example.spans.items()}
        assert words["mark"] == mark.lower()
        assert words["letter"] == "letter"
        assert f"letter {words['base']} with {mark.lower()}" in example.caption
        assert unicodedata.name(example.character).lower() == example.caption


def test_shares_by_hand():
    mask = np.zeros((4, 4), dtype=bool)
    mask[0, :2] = True  # half of the first cell
    mask[3, 3] = True  # a quarter of the last
    covers = cell_coverage(mask, (2, 2))
    np.testing.assert_allclose(covers, [[0.5, 0], [0, 0.25]])
    weights = np.array([[[0.4, 0.3], [0.1, 0.2]], [[0.1, 0.9], [0, 0]]])
    np.testing.assert_allclose(
        mark_shares(weights, np.stack([covers, covers])), [[0.25, 0.6, 1], [0.05, 0.1, 0]], atol=1e-12
    )


def test_even_weights_have_the_share_of_the_area_and_planted_ones_all_or_nothing():
    mask = np.random.default_rng(0).random((48, 48)) < 0.2
    covers = cell_coverage(mask, (5, 7))[None]
    assert mark_shares(np.full((1, 5, 7), 1 / 35), covers)[0, 0] == pytest.approx(mask.mean())
    whole = np.zeros((6, 6), dtype=bool)
    whole[2:4, 2:4] = True
    covers = cell_coverage(whole, (3, 3))[None]
    planted, beside = np.zeros((2, 1, 3, 3))
    planted[0, 1, 1], beside[0, 0, 1] = 1, 1
    assert mark_shares(planted, covers).tolist() == [[1, 1, 1]]
    assert mark_shares(beside, covers).tolist() == [[0, 0, 0]]


def test_as_many_pixels_of_the_letter_are_erased_and_none_of_the_mark():
    example = marked_images("diaeresis", 1)[0]
    erased = np.asarray(erase(example.image, example.base, np.random.default_rng(0))).astype(int)
    image, base = np.asarray(example.image), np.asarray(example.base)
    assert (erased != image).sum() == (image != base).sum()
    assert (erased >= image).all()
    assert (erased == image)[image != base].all()


@pytest.fixture
def captioner():
    """A tiny captioner with random weights that knows the words of the captions, and its processor."""
    tokenizer = train_words([example.caption for example in marked_images("diaeresis", 40)])
    torch.manual_seed(0)
    config = RegardCaptionerConfig(backbone_config=BACKBONE, vocab_size=len(tokenizer), hidden_size=16)
    model = RegardCaptionerForConditionalGeneration(config).eval()
    return model, make_captioner_processor(tokenizer, (48, 48))


def test_figures_are_those_of_the_model(captioner):
    model, processor = captioner
    examples = marked_images("diaeresis", 5)
    figures = measure_marks(model.train(), processor, examples)
    assert model.training
    model.eval()
    for number, example in enumerate(examples):
        found = attention_map(model, processor, image=example.image, target=example.caption)
        spans = [query.span for query in found.queries]
        for name, (start, end) in example.spans.items():
            rows = [place for place, span in enumerate(spans) if span and start <= span[0] and span[1] <= end]
            weights = found.matrix()[rows].mean(axis=0).reshape(found.grid)
            np.testing.assert_allclose(figures.maps[name][number], weights, atol=1e-5)
        weights = figures.maps["mark"][number]
        share = sum(
            weights[row * found.grid[0] // 48, column * found.grid[1] // 48] * found.grid[0] * found.grid[1] / 48**2
            for row, column in zip(*np.nonzero(example.mask), strict=True)
        )
        assert figures.shares["mark"][number, 0] == pytest.approx(share, abs=1e-5)
        assert figures.shares["even"][number, 0] == pytest.approx(example.mask.mean())
    shares = figures.shares
    assert all(
        (shares[name][:, 0] <= shares["most"][:, 0] + 1e-9).all() for name in ("mark", "letter", "base", "even")
    )


def test_probabilities_are_those_of_the_model(captioner):
    model, processor = captioner
    examples = marked_images("diaeresis", 4)
    figures = measure_marks(model, processor, examples)
    kinds = list(figures.probability.values())
    assert all((one != other).all() for one, other in itertools.combinations(kinds, 2))
    for number, example in enumerate(examples):
        labels = processor(labels=[example.caption], return_tensors="pt")["labels"]
        # The mark is one word, the last before the end.
        place = labels.shape[1] - 2
        assert processor.tokenizer.decode(labels[0, place]) == "diaeresis"
        for name, image in (("is", example.image), ("mark", example.base)):
            pixels = processor(images=image, return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                scores = model(pixels, labels=labels).logits[0, place].softmax(dim=-1)
            assert figures.probability[name][number] == pytest.approx(float(scores[labels[0, place]]), rel=1e-4)
            if name == "is":
                assert figures.right[number] == (int(scores.argmax()) == int(labels[0, place]))


def test_the_other_map_is_that_of_another_drawing(captioner):
    examples = marked_images("diaeresis", 4)
    figures = measure_marks(*captioner, examples)
    maps = figures.maps["mark"]
    for number, example in enumerate(examples):
        covers = np.repeat(cell_coverage(example.mask, maps.shape[1:])[None], len(maps), axis=0)
        shares = mark_shares(maps, covers)
        others = [place for place in range(len(maps)) if np.allclose(shares[place], figures.shares["other"][number])]
        assert others
        assert number not in others


@pytest.mark.parametrize(("character", "above"), [("ì", True), ("ị", False), ("í", True)])
def test_a_letter_with_a_dot_of_its_own(character, above):
    mark = unicodedata.name(character).partition(" WITH ")[2].lower()
    found = locate(drawn(character), unicodedata.name(character).lower(), mark)
    rows = np.nonzero(found.mask)[0]
    stem = np.nonzero(np.asarray(drawn("ı").draw()) < 128)[0]
    assert (rows.max() < stem.min()) if above else (rows.min() > stem.max())
    assert parts_of(found.mask) == 1


def test_letters_without_a_combining_mark_are_none():
    with pytest.raises(ValueError, match="must be a mark of the glyphs") as raised:
        marked_images("stroke", 1)
    assert "STROKE" not in str(raised.value)
    assert " AND " not in str(raised.value)


def test_layers_heads_and_seeds_are_told_apart(captioner):
    recurrent, processor = captioner
    torch.manual_seed(0)
    config = RegardCaptionerConfig(
        **{
            **recurrent.config.to_dict(),
            "decoder_type": "transformer",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    )
    model = RegardCaptionerForConditionalGeneration(config).eval()
    examples = marked_images("diaeresis", 5)

    def maps(**options):
        return measure_marks(model, processor, examples, **options).maps["mark"]

    heads = [maps(layer=0, head=head) for head in (0, 1)]
    assert not np.allclose(heads[0], heads[1])
    np.testing.assert_allclose(maps(layer=0), (heads[0] + heads[1]) / 2, atol=1e-6)
    assert not np.allclose(maps(), maps(layer=0))
    np.testing.assert_array_equal(maps(), maps(layer=1))
    one, same, other = (measure_marks(model, processor, examples, seed=seed) for seed in (0, 0, 1))
    assert (one.probability["letter"] == same.probability["letter"]).all()
    assert (one.probability["letter"] != other.probability["letter"]).any()
    assert (one.shares["other"] == same.shares["other"]).all()


def test_what_a_place_can_see(captioner):
    model, _ = captioner
    rows, columns = receptive_field(model, 48, 48)
    assert rows.shape[1] == columns.shape[1] == 48
    for seen in (rows, columns):
        for place in seen:
            (pixels,) = np.nonzero(place.numpy())
            # Without a gap, and no less than its own cell.
            assert pixels.max() - pixels.min() + 1 == len(pixels)
            assert len(pixels) >= 48 // len(seen)
        assert seen[0, 0]
        assert seen[-1, -1]


def test_the_command_draws_and_tells(captioner, tmp_path):
    model, processor = captioner
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    found = inspect_marks(tmp_path / "model", tmp_path / "marks.png", "DIAERESIS", examples=4)
    assert (tmp_path / "marks.png").read_bytes().startswith(b"\x89PNG")
    lines = mark_lines(found)
    assert lines[0].startswith("4 drawings of ")
    assert any(line.startswith("saying DIAERESIS ") for line in lines)
    assert any("with the mark erased" in line for line in lines)

    # Of one drawing there is no other whose map it could be.
    alone = inspect_marks(tmp_path / "model", tmp_path / "marks.png", "DIAERESIS", examples=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (other,) = [line for line in mark_lines(alone) if line.startswith("another drawing's")]
    assert other.split()[-3:] == ["none"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mark": "UMLAUT"}, r"^`mark` \('UMLAUT'\) must be a mark of the glyphs of the test split: .*DIAERESIS, "),
        ({"examples": 0}, r"^`examples` \(0\) must be at least 1$"),
        ({"output": "marks.txt"}, r"^`output` \(marks.txt\) must end with \.png, \.svg or \.pdf$"),
        ({"layer": 7}, r"^`layer` \(7\) must be 0 or -1$"),
        ({"head": "most"}, r"^`head` \('most'\) must be 0"),
    ],
)
def test_what_is_refused(arguments, message, captioner, tmp_path):
    model, processor = captioner
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        inspect_marks(tmp_path / "model", **{"output": tmp_path / "marks.png", "examples": 2, **arguments})


def test_a_model_that_is_no_captioner_is_refused(make_model, tmp_path):
    model, tokenizer = make_model("RegardBertForMaskedLM")
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"is a RegardBertModel, which is no captioner of ours$"):
        inspect_marks(tmp_path / "bert", tmp_path / "marks.png")
