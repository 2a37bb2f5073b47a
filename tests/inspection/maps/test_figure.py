import warnings
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from regard.inspection.maps import figure as drawing
from regard.inspection.maps.attention_map import AttentionMap
from regard.inspection.maps.figure import draw_image_map, draw_map
from regard.inspection.maps.tokens import Token
from tests.inspection.conftest import HARD, RIGHT_TO_LEFT


def drawn(figure):
    """The figure, drawn as a file is; no warning may come of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("png", "svg"):
            figure.savefig(BytesIO(), format=kind)
        FigureCanvasAgg(figure).draw()
    return figure


def boxes(figure, texts):
    found = [text.get_window_extent(figure.canvas.get_renderer()) for text in texts if text.get_text()]
    assert found
    return found


def assert_readable(figure, axes):
    """No label is cut off by the edge, none lies on another of its axis."""
    sides = [axes.get_xticklabels(which="major"), axes.get_yticklabels()]
    for place, labels in enumerate(sides):
        along = boxes(figure, labels)
        for box in along:
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.height
        centres = sorted((box.x0 + box.x1, box.y0 + box.y1)[place] / 2 for box in along)
        thickness = [min(box.width, box.height) for box in along]
        assert all(b - a >= 0.9 * min(thickness) for a, b in pairwise(centres))


@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (40, 3), (13, 37), (300, 512), (512, 4)])
def test_labels_can_be_read_whatever_the_length(shape):
    matrix = np.random.default_rng(0).random(shape)
    queries, keys = ([f"{name}{i}" for i in range(length)] for name, length in zip("qk", shape, strict=True))
    figure = drawn(draw_map(matrix, queries, keys, "a title " * 30))
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), matrix)
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == [queries[round(place)] for place in axes.get_yticks()]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        keys[round(place)] for place in axes.get_xticks()
    ]
    if max(shape) <= 40:
        assert shown == queries
    assert_readable(figure, axes)
    assert max(figure.get_size_inches()) < 14


def test_a_mark_alone_that_no_font_has_is_drawn_as_its_number(monkeypatch):
    monkeypatch.setattr(drawing, "_font_of", lambda character: drawing.FONT if character in "◌ 1/3" else None)
    labels, _ = drawing.drawable(["◌\u094d 1/3", "न\u094d"])
    assert labels == ["◌⟨094D⟩ 1/3", "⟨0928⟩"]


def test_any_text_is_drawn():
    labels = [*HARD.split(), *RIGHT_TO_LEFT.split(), "中" * 50, "x" * 200, "$\\frac{$", "a\u200cb", "हिन्दी"]
    figure = drawn(draw_map(np.eye(len(labels)), labels, labels[::-1], HARD))
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "$x$" in shown
    assert "naïve" in shown
    assert max(map(len, shown)) <= 24
    assert_readable(figure, figure.axes[0])


def test_what_no_font_has_is_shown_by_its_number(monkeypatch):
    monkeypatch.setattr(drawing, "_font_of", lambda character: None if character in "中\ufe0f" else drawing.FONT)
    figure = draw_map(np.eye(1), ["a中❤\ufe0f"], ["b"], "")
    assert figure.axes[0].get_yticklabels()[0].get_text() == "a⟨4E2D⟩❤"


def test_a_font_is_found_for_what_the_first_has_not():
    assert drawing._font_of("é") == drawing.FONT
    # Of matplotlib's own fonts.
    others = {chr(code) for code in drawing._characters_of(drawing.font_manager.findfont("STIXGeneral"))}
    missing = min(
        character
        for character in others
        if character not in map(chr, drawing._characters_of(drawing.font_manager.findfont(drawing.FONT)))
    )
    family = drawing._font_of(missing)
    assert family not in (None, drawing.FONT)
    _, style = drawing.drawable([f"a{missing}"])
    assert style["fontfamily"] == [drawing.FONT, family]


@pytest.mark.parametrize("size", [(90, 70), (20, 300), (640, 31)])
def test_an_image_is_shown_at_its_own_resolution(size):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(256, size=size[::-1], dtype=np.uint8))
    matrix = rng.random((9, 12)).astype(np.float32)
    matrix /= matrix.sum(-1, keepdims=True)
    words = [f"word{i}" for i in range(8)] + ["中$"]
    figure = drawn(draw_image_map(matrix, words, image, (3, 4), "title"))
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 10
    for number, axes in enumerate(panels):
        assert axes.images[0].get_array().shape == (*size[::-1], 3)
        np.testing.assert_array_equal(axes.images[0].get_array()[..., 0], np.asarray(image))
        if number:
            heat = axes.images[1]
            assert heat.get_extent() == axes.images[0].get_extent()
            alpha = heat.get_array()[..., 3].ravel()
            np.testing.assert_allclose(alpha / matrix[number - 1], alpha.max() / matrix[number - 1].max(), rtol=1e-5)
            assert axes.get_title().startswith(words[number - 1][:4] if number < 9 else "")
    for box in boxes(figure, [axes.title for axes in panels]):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


def test_long_words_over_images_do_not_run_into_each_other():
    words = ["internationalisation's own", "row 10, column 12", "counterrevolutionaries"]
    figure = drawn(draw_image_map(np.full((3, 4), 0.25), words, Image.new("L", (9, 9)), (2, 2), "title"))
    titles = boxes(figure, [axes.title for axes in figure.axes])
    assert all(left.x1 < right.x0 for left, right in pairwise(titles))
    assert figure.axes[2].get_title() == "row 10, column 12 (25%)"


def test_a_map_draws_what_was_asked_for():
    token = Token("a", "a", (0, 1), 0, "a")
    weights = np.random.default_rng(0).random((2, 3, 1, 1), dtype=np.float32)
    attention = AttentionMap(weights, (token,), (token,), "self", "name")
    figure = attention.figure(-2, 1)
    assert figure.axes[0].images[0].get_array()[0, 0] == weights[0, 1, 0, 0]
    assert figure.get_suptitle() == "name · self attention, layer 0, head 1"
    assert attention.figure(head="max").get_suptitle().endswith("layer 1, max of 3 heads")
