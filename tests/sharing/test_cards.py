import ast
import copy
import json
import re

import pytest
from huggingface_hub import ModelCard

from regard.configuration.bert import RegardBertConfig
from regard.sharing.cards import bert_card, public_source, write_card

CONFIG = RegardBertConfig(vocab_size=1_234, hidden_size=128, num_hidden_layers=3, num_attention_heads=4)
RESULTS = {
    "family": "bert",
    "architecture": "RegardBertForPreTraining",
    "parameters": 1_234_567,
    "metrics": {
        "masked_accuracy": 0.41236,
        "masked_accuracy_baseline": 0.0789,
        "masked_loss": 3.14159,
        "masked_loss_unigram": 6.5,
        "next_sentence_accuracy": 0.876,
        "next_sentence_baseline": 0.512,
    },
    "filled": [{"text": "The [MASK] sat.", "word": "cat", "guesses": ["dog", "cat", "##s"]}],
    "step": 1_000,
    "epoch": 3,
    "step_in_epoch": 2,
    "seconds": 321.4,
    "tokens": 4_567_890,
    "processes": 1,
    "device": "cpu",
    "data": {
        "documents": 4_321,
        "tokens": 765_432,
        "examples": 999,
        "unknown_share": 0.00123,
        "held_out_documents": 21,
        "held_out_examples": 45,
        "random_pairs_share": 0.5,
    },
    "settings": {
        "data": ["python-docs"],
        "language": "en",
        "validation": "0.05",
        "tokenizer": None,
        "batch_size": 32,
        "max_length": 128,
        "precision": "no",
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup": 0.1,
        "weight_decay": 0.01,
        "dropout": 0.1,
        "seed": 0,
        "mask_rate": 0.15,
        "whole_words": False,
        "next_sentence": True,
    },
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
}


def changed(**parts) -> dict:
    """The results with some of their parts, or parts of parts, replaced."""
    results = copy.deepcopy(RESULTS)
    for name, part in parts.items():
        results[name] = {**results[name], **part} if isinstance(part, dict) else part
    return results


def rows(card: ModelCard, first_cell: str) -> list[str]:
    """The lines of the table whose header begins with this cell."""
    lines = card.text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    assert set(lines[start + 1]) == {"|", "-"}
    end = next(number for number, line in enumerate([*lines, ""]) if number > start and not line.startswith("|"))
    return lines[start + 2 : end]


def cells(row: str) -> list[str]:
    """The cells of a row as Markdown shows them: a pipe parts cells where nothing escapes it."""
    parts = re.findall(r"(?:\\.|[^\\|])*(?=\|)", row)
    return [re.sub(r"\\(.)", r"\1", part).strip() for part in parts if part]


def test_a_card_is_read_back_with_its_figures(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    write_card(tmp_path, RESULTS)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "fill-mask"
    assert card.data.language == "en"
    assert card.data.tags == ["regard", "regard_bert"]
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures == {"accuracy": 0.4124, "cross_entropy": 3.1416}
    assert {result.task_type for result in card.data.eval_results} == {"fill-mask"}
    assert card.data.model_name == "BERT"
    assert bert_card(RESULTS, CONFIG, title="Ours: a BERT").data.model_name == "Ours: a BERT"


def test_what_a_card_says():
    text = bert_card(RESULTS, CONFIG).text
    for part in ("3 layers, 128 wide, 4 heads, 1,234 word pieces", "1,234,567 parameters", "next sentence prediction"):
        assert part in text
    for part in ("4,321 documents, 765,432 word pieces, 0.123% of them unknown", "1,000 steps of 32 examples"):
        assert part in text
    assert "4,567,890 tokens in 321 seconds on 1 × cpu, precision float32" in text
    assert "15% of the tokens predicted." in text
    assert "Versions: torch 2.13.0, transformers 5.24.0." in text
    assert "45 examples from 21 held-out documents" in text
    assert [cells(row) for row in rows(bert_card(RESULTS, CONFIG), "figure")] == [
        ["masked tokens predicted right", "41.2%", "7.9% (the most frequent token)"],
        ["loss per masked token, nats", "3.142", "6.500 (token frequencies)"],
        ["next sentences told from random ones", "87.6%", "51.2% (the more frequent kind)"],
    ]
    assert [cells(row) for row in rows(bert_card(RESULTS, CONFIG), "sentence")] == [
        ["The [MASK] sat.", "cat", "dog, cat, ##s"]
    ]


def test_what_a_card_says_of_other_settings():
    metrics = {name: value for name, value in RESULTS["metrics"].items() if name.startswith("masked")}
    results = changed(settings={"next_sentence": False, "whole_words": True, "precision": "bf16"}, filled=[])
    card = bert_card({**results, "metrics": metrics}, CONFIG)
    assert "next sentence" not in card.text
    assert "15% of the tokens predicted, whole words at a time." in card.text
    assert "precision bf16" in card.text
    assert len(rows(card, "figure")) == 2
    assert "| sentence |" not in card.text
    assert "[MASK]" in card.text


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
    ],
)
def test_local_sources_are_not_named(source, called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret" / "notes").mkdir(parents=True)
    assert public_source(source) == called


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
    card = bert_card(changed(filled=[example, RESULTS["filled"][0]]), CONFIG)
    table = rows(card, "sentence")
    assert len(table) == 2
    words = " ".join(nasty.split())
    assert cells(table[0]) == [f"[MASK] {words} end", words, f"{words}, b, c"]
    # No character that means something is left bare.
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_<>\[\]]", table[0])
    # The same card otherwise.
    plain = bert_card(
        changed(filled=[{**example, "text": "x", "word": "x", "guesses": ["x"]}, RESULTS["filled"][0]]), CONFIG
    )
    assert card.text.splitlines()[-6:] == plain.text.splitlines()[-6:]
    assert card.data.to_dict() == plain.data.to_dict()


@pytest.mark.parametrize("nasty", NASTY)
def test_the_snippet_is_python_whatever_the_text(nasty):
    text = f"[MASK] {nasty} end"
    card = bert_card(changed(filled=[{"text": text, "word": "x", "guesses": ["x"]}]), CONFIG)
    (code,) = re.findall(r"^```python\n(.*?)\n```$", card.text, re.MULTILINE | re.DOTALL)
    call = ast.parse(code).body[-1].value
    assert ast.literal_eval(call.args[0]) == text


def test_metadata_with_names_that_mean_something_to_yaml(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    write_card(tmp_path, changed(settings={"data": ["org/data:a"], "language": "no"}))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.language == "no"
    assert card.data.eval_results[0].dataset_name == "held-out documents of the data set org/data:a"
    assert json.dumps(card.data.to_dict())
