"""The page of a map: what is in it, and what a browser makes of it."""

import base64
import html
import json
import re
import zlib
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from regard.inspection.maps.attention_map import AttentionMap, attention_map
from regard.inspection.maps.tokens import Token
from tests.inspection.conftest import HARD, RIGHT_TO_LEFT, TEXT
from tests.support.chromium import Chromium, find_chromium

TEXTS = {"plain": TEXT, "hard": HARD, "right to left": RIGHT_TO_LEFT}


class Reader(HTMLParser):
    """Gathers the elements of a page: name, attributes and text of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[SimpleNamespace] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append(SimpleNamespace(tag=tag, attributes=dict(attributes), text=""))

    def handle_data(self, data):
        if self.elements:
            self.elements[-1].text += data

    def by_id(self, name):
        (found,) = [element for element in self.elements if element.attributes.get("id") == name]
        return found


@pytest.fixture
def make_map(make_model):
    def make(name: str = "RegardBertForMaskedLM", text: str = TEXT, **options) -> AttentionMap:
        return attention_map(*make_model(name), text, **options)

    return make


@pytest.fixture
def caption_map(make_captioner):
    pixels = np.random.default_rng(0).integers(256, size=(70, 90, 3), dtype=np.uint8)
    return attention_map(*make_captioner(), image=Image.fromarray(pixels), target="a small red bird")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["RegardBertForMaskedLM", "GPT2LMHeadModel"])
def test_the_page_holds_the_labels_exactly(make_map, name, text):
    attention = make_map(name, text)
    attention = AttentionMap(**{**vars(attention), "title": HARD})
    page = attention.to_html()
    page.encode("utf-8")
    reader = Reader(page)
    data = json.loads(reader.by_id("data").text)
    assert data["queries"]["labels"] == [token.label for token in attention.queries]
    assert data["title"] == HARD.replace("\u2028", "⟨2028⟩")
    assert data["queries"]["direction"] == ("rtl" if text == RIGHT_TO_LEFT else "ltr")
    # Nothing of the text has become part of the page.
    scripts = [element for element in reader.elements if element.tag == "script"]
    assert len(scripts) == 2 + attention.layers * attention.heads
    assert not re.search("[\u2028\u202a-\u202e\u2066-\u2069]", page)
    plain = Reader(make_map().to_html())
    assert [element.tag for element in reader.elements] == [element.tag for element in plain.elements]


def test_the_page_needs_nothing_but_itself(make_map, caption_map):
    for attention in (make_map(), caption_map):
        reader = Reader(attention.to_html())
        for element in reader.elements:
            assert not element.attributes.keys() & {"src", "href", "srcset", "action"}
            assert element.tag not in ("link", "iframe", "base")
        assert (
            "default-src 'none'"
            in next(e for e in reader.elements if "http-equiv" in e.attributes).attributes["content"]
        )
        assert not re.search(r"https?://|@import|\bimport\(|fetch\(|XMLHttp", attention.to_html())


def test_weights_are_kept_to_the_promised_precision(make_map):
    attention = make_map()
    reader = Reader(attention.to_html())
    for layer in range(attention.layers):
        for head in range(attention.heads):
            packed = zlib.decompress(base64.b64decode(reader.by_id(f"weights-{layer}-{head}").text))
            kept = (np.frombuffer(packed, dtype=np.uint8) / 255.0) ** 2
            weights = attention.weights[layer, head].ravel()
            assert (np.abs(kept - weights) <= 0.004 * np.sqrt(weights) + 4e-6).all()


def test_small_weights_of_a_long_text_are_not_lost():
    token = Token("a", "a", (0, 1), 0, "a")
    attention = AttentionMap(np.full((1, 1, 1, 1024), 1 / 1024, dtype=np.float32), (token,), (token,) * 1024, "cross")
    packed = zlib.decompress(base64.b64decode(Reader(attention.to_html()).by_id("weights-0-0").text))
    assert abs(((np.frombuffer(packed, dtype=np.uint8) / 255.0) ** 2).sum() - 1) < 0.02


def test_a_notebook_shows_the_page_in_a_frame(make_map, monkeypatch):
    attention = make_map(text=HARD)
    (frame,) = Reader(attention._repr_html_()).elements
    assert frame.tag == "iframe"
    assert frame.attributes["srcdoc"] == attention.to_html()
    assert frame.attributes["sandbox"] == "allow-scripts"
    monkeypatch.setattr("regard.inspection.maps.page.NOTEBOOK_WEIGHTS", attention.weights.size - 1)
    assert "save_html" in attention._repr_html_()


def test_a_large_image_goes_in_small(caption_map):
    large = Image.fromarray(np.random.default_rng(0).integers(256, size=(1100, 1000, 3), dtype=np.uint8))
    attention = AttentionMap(**{**vars(caption_map), "image": large})
    data = json.loads(Reader(attention.to_html()).by_id("data").text)
    assert data["image"]["source"].startswith("data:image/jpeg;")
    assert (data["image"]["width"], data["image"]["height"]) == (1000, 1100)


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium or Chrome is installed")
    browser = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens the page of a map from a file, and checks afterwards that it had no complaint and used no network."""
    opened = []

    def show(attention: AttentionMap, *args, **options) -> Chromium:
        file = attention.save_html(tmp_path / f"page {len(opened)}.html", *args, **options)
        opened.append(file)
        browser.open(file.as_uri())
        browser.wait("typeof view !== 'undefined' && view !== null && document.readyState === 'complete'")
        return browser

    yield show
    assert browser.errors == []
    assert opened
    assert [request for request in browser.requests if not request.startswith(("file:", "data:"))] == []


def assert_shows(browser, matrix: np.ndarray) -> None:
    """The page shows a matrix, once it has drawn what was asked for last."""
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    found = np.array(browser.evaluate("Array.from(view.weights)")).reshape(matrix.shape)
    np.testing.assert_allclose(found, matrix, atol=0.01)


def labels(browser, side: str) -> list[str]:
    return browser.evaluate(f"Array.from(document.querySelectorAll('#{side} .token'), (token) => token.textContent)")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_browser_shows_the_labels(make_map, shown, text):
    attention = make_map(text=text)
    browser = shown(attention)
    expected = [token.label for token in attention.queries]
    assert labels(browser, "queries") == labels(browser, "keys") == expected
    assert browser.evaluate("document.getElementById('queries').dir") == ("rtl" if text == RIGHT_TO_LEFT else "ltr")
    assert_shows(browser, attention.matrix())


def test_a_browser_takes_no_label_for_markup(shown):
    marked = [
        "<b>x</b>",
        "&amp;",
        "<img src=x onerror='document.title=1'>",
        "</script><script>document.title=1</script>",
    ]
    tokens = tuple(Token(text, text, (0, 1), number, text) for number, text in enumerate(marked))
    weights = np.full((1, 1, 4, 4), 0.25, dtype=np.float32)
    browser = shown(AttentionMap(weights, tokens, tokens, "self", marked[2]))
    assert labels(browser, "queries") == marked
    for number, text in enumerate(marked):
        browser.point(f"#query-{number}")
        assert browser.evaluate("document.getElementById('said').textContent").startswith(f"{text} attends to ")
        assert browser.evaluate("document.getElementById('tip').textContent").startswith(text)
    assert browser.evaluate("document.title") == f"{marked[2]} · self attention"
    assert browser.evaluate("document.querySelectorAll('img').length") == 1


def test_the_pickers(make_map, shown):
    attention = make_map()
    browser = shown(attention, layer=0, head=1)
    assert_shows(browser, attention.matrix(0, 1))
    for layer, head in ((2, "3"), (1, "max"), (1, "mean")):
        for name, value in (("layer", layer), ("head", head)):
            browser.evaluate(
                f"{name} = document.getElementById('{name}'); {name}.value = '{value}';"
                f"{name}.dispatchEvent(new Event('change'))"
            )
        assert_shows(browser, attention.matrix(layer, int(head) if head.isdecimal() else head))


def test_the_keyboard(make_map, shown):
    attention = make_map()
    browser = shown(attention, layer=1, head=0)
    for key, layer, head in (
        ("ArrowUp", 0, 0),
        ("ArrowUp", 0, 0),
        ("ArrowRight", 0, 1),
        ("ArrowDown", 1, 1),
        ("ArrowLeft", 1, 0),
        ("ArrowLeft", 1, "max"),
        ("ArrowLeft", 1, "mean"),
        ("ArrowLeft", 1, "mean"),
    ):
        browser.press(key)
        assert_shows(browser, attention.matrix(layer, head))
        assert browser.evaluate("[document.getElementById('layer').value, document.getElementById('head').value]") == [
            str(layer),
            str(head),
        ]
    browser.press("w")
    assert_shows(browser, attention.by_words().matrix(1))


def test_words(make_map, shown):
    attention = make_map(text="unhashed riverbanks don't return")
    words = attention.by_words()
    assert len(words.queries) < len(attention.queries)
    browser = shown(attention, words=True)
    assert_shows(browser, words.matrix())
    assert labels(browser, "keys") == [word.label for word in words.keys]
    # The largest of the heads' sums over the pieces.
    browser.press("ArrowRight")
    assert_shows(browser, words.matrix(head="max"))
    browser.press("ArrowLeft")
    assert_shows(browser, words.matrix())
    browser.point("#words", click=True)
    assert_shows(browser, attention.matrix())
    assert labels(browser, "keys") == [token.label for token in attention.keys]


def shares(browser, side: str) -> np.ndarray:
    tokens = f"document.querySelectorAll('#{side} .token')"
    return np.array(browser.evaluate(f"Array.from({tokens}, (token) => +token.style.getPropertyValue('--weight'))"))


def test_pointing_at_a_token_shows_its_weights(make_map, shown):
    attention = make_map("BartForConditionalGeneration", "the bank", target="river")
    matrix = attention.matrix()
    browser = shown(attention)
    browser.point("#query-2")
    np.testing.assert_allclose(shares(browser, "keys"), matrix[2] / matrix[2].max(), atol=0.02)
    best = attention.keys[matrix[2].argmax()].label
    said = browser.evaluate("document.getElementById('said').textContent")
    assert said.startswith(f"{attention.queries[2].label} attends to ")
    assert best in said
    assert re.search(r"\d%", said)
    browser.point("#key-4")
    np.testing.assert_allclose(shares(browser, "queries"), matrix[:, 4] / matrix[:, 4].max(), atol=0.02)
    assert "gets attention from" in browser.evaluate("document.getElementById('said').textContent")
    # Held, it stays while the pointer goes to the other text, and a number is told there.
    browser.point("#key-4", click=True)
    browser.point("#query-1")
    np.testing.assert_allclose(shares(browser, "queries"), matrix[:, 4] / matrix[:, 4].max(), atol=0.02)
    told = browser.evaluate("document.getElementById('tip').textContent")
    assert told.startswith(f"{attention.queries[1].label} → {attention.keys[4].label}: ")
    assert abs(float(told.rpartition(" ")[2].rstrip("%")) / 100 - matrix[1, 4]) < 0.01
    browser.press("Escape")
    assert not shares(browser, "queries").any()


def test_tokens_are_reached_by_the_keyboard(make_map, shown):
    browser = shown(make_map())
    browser.evaluate("document.getElementById('queries').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
    assert browser.evaluate("document.getElementById('queries').getAttribute('aria-activedescendant')") == "query-1"
    assert browser.evaluate("document.getElementById('query-1').getAttribute('aria-selected')") == "true"
    assert browser.evaluate("[state.layer, state.head]") == [2, "mean"]
    browser.press("End")
    assert browser.evaluate("state.chosen.place") == browser.evaluate("view.queries.count") - 1


def test_the_grid(make_map, shown):
    attention = make_map("BartForConditionalGeneration", "the bank", target="river")
    browser = shown(attention)
    x, y, width, height = browser.evaluate(
        "(() => { const c = document.getElementById('canvas');"
        "return [shape.left + 3.5 * shape.cell, shape.top + 1.5 * shape.cell, c.clientWidth, c.clientHeight]; })()"
    )
    browser.point("#canvas", x / width, y / height)
    told = browser.evaluate("document.getElementById('tip').textContent")
    assert told.startswith(f"{attention.queries[1].label} → {attention.keys[3].label}: ")
    assert browser.evaluate("[state.chosen.side, state.chosen.place]") == ["query", 1]
    # The cell has the colour of its weight: white at zero, dark at the largest.
    matrix = attention.matrix()
    colours = browser.evaluate("""(() => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const at = (start, n) => Math.round((start + (n + 0.5) * shape.cell) * devicePixelRatio);
        return Array.from(view.weights, (_, i) => {
            const [row, column] = [Math.floor(i / view.keys.count), i % view.keys.count];
            const first = 4 * (at(shape.top, row) * canvas.width + at(shape.left, column));
            return Array.from(pixels.slice(first, first + 3));
        });
    })()""")
    brightness = np.array(colours).sum(axis=-1)
    matrix = attention.matrix()
    assert np.abs(brightness[matrix.ravel().argsort()[::-1]] - np.sort(brightness)).max() <= 12


def test_light_and_dark(make_map, shown):
    browser = shown(make_map())
    pictures = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        pictures.append(browser.screenshot())
        ground, ink = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            ".map((colour) => colour.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0))"
        )
        assert (ground > ink) == (scheme == "light")
    browser.prefer("light")
    assert pictures[0] != pictures[1]


def test_a_text_of_512_tokens(shown):
    weights = np.random.default_rng(0).random((2, 3, 512, 512), dtype=np.float32) ** 8
    tokens = tuple(Token(f"t{i}", f"t{i}", (4 * i, 4 * i + 3), i // 2, f"w{i // 2}") for i in range(512))
    attention = AttentionMap(weights / weights.sum(-1, keepdims=True), tokens, tokens, "self")
    browser = shown(attention)
    assert_shows(browser, attention.matrix())
    browser.press("w")
    assert_shows(browser, attention.by_words().matrix())
    browser.point("#query-3")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_very_long_word(shown):
    tokens = tuple(Token(text, text, (0, 1), i, text) for i, text in enumerate(("a", "pneumono" * 200, "b")))
    browser = shown(AttentionMap(np.full((1, 1, 3, 3), 1 / 3, np.float32), tokens, tokens, "self"))
    browser.point("#query-1", 0.2, 0.01)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("document.getElementById('tip').offsetHeight < innerHeight / 3")
    assert browser.evaluate("document.getElementById('said').offsetHeight < innerHeight / 3")


def test_words_over_an_image(caption_map, shown):
    browser = shown(caption_map)
    browser.wait("document.getElementById('image').complete")
    assert browser.evaluate("[image.naturalWidth, image.naturalHeight]") == [90, 70]
    assert browser.evaluate("[overlay.width / overlay.height, overlay.clientWidth, overlay.clientHeight]") == [
        pytest.approx(9 / 7),
        browser.evaluate("image.clientWidth"),
        browser.evaluate("image.clientHeight"),
    ]
    browser.point("#query-2")
    alphas = browser.evaluate(
        "Array.from(overlay.getContext('2d').getImageData(0, 0, overlay.width, overlay.height).data)"
        ".filter((_, i) => i % 4 == 3)"
    )
    width, height = browser.evaluate("[overlay.width, overlay.height]")
    alphas = np.array(alphas).reshape(height, width)
    rows, columns = caption_map.grid
    matrix = caption_map.matrix()
    # At the middle of each place the overlay has its weight.
    middles = alphas[
        ((np.arange(rows) + 0.5) * height / rows).astype(int)[:, None],
        ((np.arange(columns) + 0.5) * width / columns).astype(int),
    ]
    np.testing.assert_allclose(middles / 217, matrix[2].reshape(rows, columns) / matrix.max(), atol=0.1)
    # And back: a place of the image shows which words looked there.
    browser.point("#overlay", 0.5 / columns, 1.5 / rows)
    expected = matrix[:, columns] / matrix[:, columns].max()
    np.testing.assert_allclose(shares(browser, "queries"), expected, atol=0.02)


def test_the_frame_of_a_notebook_works(make_map, browser, tmp_path):
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{make_map()._repr_html_()}", encoding="utf-8")
    browser.open(file.as_uri())
    browser.wait("document.readyState === 'complete'")
    picture = browser.screenshot()
    file.write_text(html.unescape(file.read_text(encoding="utf-8")).partition("<iframe")[0], encoding="utf-8")
    browser.open(file.as_uri())
    browser.wait("document.readyState === 'complete'")
    assert len(picture) > 3 * len(browser.screenshot())
    assert browser.errors == []
