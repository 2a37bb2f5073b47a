"""What a card must not say, and text that it must not take for something else."""

import ast
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from regard.sharing.cards import model_card, public_source, write_card
from regard.training.builtin.dates import LOCALES
from tests.support.cards import ALL_RESULTS, CONFIG, CONFIGS, EXAMPLES, FAMILIES, RESULTS, cells, changed, rows
from tests.support.families import FAMILY_CARDS

# Nothing of the machine


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("python-docs", "the documentation in Python's standard library (`python-docs`)"),
        ("python-docs:torch", "the documentation in Python's standard library (`python-docs:torch`)"),
        ("org/data", "the data set `org/data`"),
        ("org/data:config", "the data set `org/data:config`"),
        ("/home/someone/secret/notes.txt", "local files"),
        ("secret/notes-*.txt", "local files"),
        ("notes.txt", "local files"),
        ("python-docs-of-someone.txt", "local files"),
        ("../secret", "local files"),
        ("C:\\Users\\someone\\notes.txt", "local files"),
        ("secret/notes", "local files"),  # a folder that is there
        ("dates:de,fr", "dates in 2 locales, written by Babel's CLDR (`dates:de,fr`)"),
        ("dates: de, de", "dates in 1 locale, written by Babel's CLDR (`dates: de, de`)"),
        ("dates", f"dates in {len(LOCALES)} locales, written by Babel's CLDR (`dates`)"),
        ("dates.csv", "local files"),
        ("glyphs", "characters drawn with the DejaVu fonts, captioned by their Unicode names (`glyphs`)"),
        ("glyphs.jsonl", "local files"),
    ],
)
def test_local_sources_are_not_named(source, called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret" / "notes").mkdir(parents=True)
    assert public_source(source) == called


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_names_a_local_path(family):
    settings = {
        "data": ["/home/someone/a.txt", "someone.jsonl"],
        "validation": "/home/someone/held-out.txt",
        "tokenizer": "/home/someone/tokenizer",
        "backbone": "/home/someone/backbone",
    }
    card = model_card(changed(family, settings=settings), CONFIGS[family])
    assert "someone" not in card.content
    assert "/home" not in card.content
    assert "Data: local files;" in card.text


def test_what_is_built_in_for_one_family_is_a_file_to_another():
    for family, source in {"bert": "dates", "decoder": "glyphs", "recurrent": "python-docs"}.items():
        assert "Data: local files;" in model_card(changed(family, settings={"data": [source]}), CONFIGS[family]).text


def test_no_local_path_is_in_a_card(tmp_path, monkeypatch):
    folder = tmp_path / "someone" / "model"
    CONFIG.save_pretrained(folder)
    settings = {
        "data": ["/home/someone/a.txt", "/home/someone/b.txt", "python-docs"],
        "validation": "/home/someone/held-out.txt",
        "tokenizer": "/home/someone/tokenizer",
    }
    write_card(folder, changed(settings=settings))
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "someone" not in text
    assert "/home" not in text
    assert "Data: local files, the documentation in Python's standard library" in text


# Text that means something to Markdown, HTML, YAML or the template

NASTY = [
    "a | b || c",
    "`code` ``more`` ```",
    "two\nlines\r\n\nand a rule\n---\n",
    "<script>alert(1)</script> <b>bold</b> <!-- ",
    "**bold** _it_ [link](http://a.b) ![image](x) ~no~",
    "back\\slash \\| pipe \\",
    "{{ 7 * 7 }} {% raw %} {# comment #}",
    "quotes ' \" ''' \"\"\"",
    "😀 中国 naïve \u2028 \u202e",
]


@pytest.mark.parametrize("nasty", NASTY)
def test_text_stays_in_its_cell(nasty):
    example = {"text": f"[MASK] {nasty} end", "word": nasty, "guesses": [nasty, "b", "c"]}
    card = model_card(changed(filled=[example, RESULTS["filled"][0]]), CONFIG)
    table = rows(card, "sentence")
    assert len(table) == 2
    words = " ".join(nasty.split())
    assert cells(table[0]) == [f"[MASK] {words} end", words, f"{words}, b, c"]
    # No character that means something is left bare.
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_<>\[\]]", table[0])
    # The same card otherwise.
    plain = model_card(
        changed(filled=[{**example, "text": "x", "word": "x", "guesses": ["x"]}, RESULTS["filled"][0]]), CONFIG
    )
    assert card.text.splitlines()[-6:] == plain.text.splitlines()[-6:]
    assert card.data.to_dict() == plain.data.to_dict()


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_text_of_any_family_stays_in_its_cell(family):
    columns = FAMILY_CARDS[family].columns
    ending = model_card(changed(family), CONFIGS[family]).text.splitlines()[-6:]
    for nasty in NASTY:
        example = {part: f"{number} {nasty} end" for number, part in enumerate(columns.values())}
        card = model_card(changed(family, generated=[example, ALL_RESULTS[family]["generated"][0]]), CONFIGS[family])
        table = rows(card, next(iter(columns)))
        assert len(table) == 2
        words = " ".join(nasty.split())
        assert cells(table[0]) == [f"{number} {words} end" for number in range(len(columns))]
        assert not re.search(r"(?<!\\)(?:\\\\)*[`*_<>\[\]~$&]", table[0])
        assert card.text.splitlines()[-6:] == ending


def snippet(card: ModelCard) -> ast.Module:
    (code,) = re.findall(r"^```python\n(.*?)\n```$", card.text, re.MULTILINE | re.DOTALL)
    return ast.parse(code)


@pytest.mark.parametrize("family", ["bert", "decoder", "transformer", "recurrent"])
def test_the_snippet_is_python_whatever_the_text(family):
    column = next(iter(FAMILY_CARDS[family].columns.values()))
    for text in (f"[MASK] {nasty} end" for nasty in NASTY):
        example = {**ALL_RESULTS[family][EXAMPLES[family]][0], column: text}
        module = snippet(model_card(changed(family, **{EXAMPLES[family]: [example]}), CONFIGS[family]))
        assert text in [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_snippet_without_an_example(family):
    card = model_card(changed(family, **{EXAMPLES[family]: []}), CONFIGS[family])
    assert snippet(card)
    assert "None" not in card.text


def test_metadata_with_names_that_mean_something_to_yaml(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    write_card(tmp_path, changed(settings={"data": ["org/data:a"], "language": "no"}))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.language == "no"
    assert card.data.eval_results[0].dataset_name == "held-out documents of the data set org/data:a"
    assert json.dumps(card.data.to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_card_tells_how_else_the_model_loads(family):
    text = model_card(ALL_RESULTS[family], CONFIGS[family]).text
    assert "import regard" in text
    assert "`trust_remote_code=True`" in text
    assert ("`regard export`" in text) == (family in ("bert", "decoder", "transformer"))


def test_the_hubs_data_sets_are_in_the_metadata(tmp_path):
    def data_sets(*data: str) -> list[str] | None:
        results = {**RESULTS, "settings": {**RESULTS["settings"], "data": list(data)}}
        return model_card(results, CONFIG).data.datasets

    assert data_sets("org/name:en", "python-docs", str(tmp_path), "org/name:de", "org/other") == [
        "org/name",
        "org/other",
    ]
    assert data_sets("python-docs") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_card_of_the_reference_model(family):
    card = ModelCard.load(Path(__file__).parents[2] / "model_cards" / f"reference_{family}.md")
    assert card.data.license == "apache-2.0"
    assert f"regard_{family}" in card.data.tags
    assert {result.metric_type for result in card.data.eval_results} == {
        result.metric_type for result in model_card(ALL_RESULTS[family], CONFIGS[family]).data.eval_results
    }
