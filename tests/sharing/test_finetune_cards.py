"""Cards of fine-tuned models."""

import ast
import copy
import json
import re
from dataclasses import fields

import pytest
from huggingface_hub import ModelCard, constants
from transformers import BertConfig

from regard.configuration.bert import RegardBertConfig
from regard.sharing.cards import TASK_CARDS, model_card, write_card
from regard.training.finetuning.finetune import TASKS
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.run.settings import to_dict

OURS = RegardBertConfig(vocab_size=37, hidden_size=12, num_attention_heads=3, max_position_embeddings=99)
STOCK = BertConfig(vocab_size=37, hidden_size=12, num_attention_heads=3, max_position_embeddings=99)
LABELS = {"house": 1_234, "music": 17, "water": 21}
# What the runs measured, and what they tell of their data.
TOLD = {
    "classification": (
        {"loss": 1.04278, "accuracy": 0.53333, "f1": 0.4183, "matthews_correlation": -0.40687}
        | {"accuracy_baseline": 0.34567},
        {"labels": LABELS},
    ),
    "regression": (
        {"loss": 0.0000123, "mse": 0.0000123, "pearson": 0.24419, "spearman": 0.28786, "mse_baseline": 12.345678},
        {"labels": {"mean": 0.401042}},
    ),
    "multi-label": (
        {"loss": 0.6376, "f1": 0.68085, "f1_macro": 0.47994, "accuracy": 0.375},
        {"labels": LABELS},
    ),
    "tokens": (
        {"loss": 0.73968, "precision": 0.512, "recall": 0.54167, "f1": 0.5211}
        | {"f1_LOC": 0.59459, "f1_PER": 0.30769, "accuracy": 0.77143, "accuracy_baseline": 0.61239},
        {"labels": {"B-LOC": 72, "B-PER": 58, "O": 132}},
    ),
    "question-answering": (
        {"loss": 1.85178, "exact_match": 0.91234, "f1": 0.95678},
        {"unanswerable": 0, "windows": {"data": 4_321, "validation": 22}},
    ),
    "multiple-choice": ({"loss": 0.41794, "accuracy": 0.87654, "accuracy_baseline": 0.33333}, {}),
}
RESULTS = {
    task: {
        "task": task,
        "architecture": f"RegardBert{TASK_CARDS[task].auto_class.removeprefix('AutoModel')}",
        "parameters": 1_234_567,
        "metrics": metrics,
        "step": 1_600,
        "best_step": 1_200,
        "epoch": 4.0,
        "history": [],
        "seconds": 321.4,
        "device": "cpu",
        "data": {**told, "rows": 5_432, "held_out_rows": 1_501},
        "settings": to_dict(FinetuneSettings(data=["rows.jsonl"])),
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    for task, (metrics, told) in TOLD.items()
}
PIPELINES = dict.fromkeys(RESULTS, "text-classification") | {
    "tokens": "token-classification",
    "question-answering": "question-answering",
    "multiple-choice": "multiple-choice",
}


def card_with(task: str, settings: dict | None = None, config=OURS, **parts) -> ModelCard:
    """The card of a task's model, with other settings, and other parts of the results."""
    results = copy.deepcopy(RESULTS[task])
    results["settings"] |= settings or {}
    for name, part in parts.items():
        results[name] = {**results[name], **part} if isinstance(part, dict) else part
    return model_card(results, config)


def table(card: ModelCard, first_cell: str) -> list[list[str]]:
    """The cells of the table whose header begins with this cell."""
    lines = card.text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    end = next(number for number, line in enumerate([*lines, ""]) if number > start and not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]]


def snippet(card: ModelCard) -> str:
    (code,) = re.findall(r"^```python\n(.*?)\n```$", card.text, re.MULTILINE | re.DOTALL)
    return code


def test_every_task_has_a_card():
    assert list(TASK_CARDS) == list(TASKS) == list(RESULTS)
    for task, work in TASKS.items():
        card = TASK_CARDS[task]
        assert card.auto_class == work.auto_class
        metrics = [figure.metric for figure in card.figures]
        # The best model is chosen by the first, as the card says.
        assert metrics[0] == work.best_by
        assert set(work.measured) <= set(metrics)


@pytest.mark.parametrize("task", RESULTS)
def test_the_card_of_each_task_is_read_back(task, tmp_path):
    OURS.save_pretrained(tmp_path)
    write_card(tmp_path, RESULTS[task])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.content == model_card(RESULTS[task], OURS).content
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["regard", "regard_bert"]
    assert card.data.pipeline_tag == PIPELINES[task]
    assert (card.data.base_model, card.data.datasets, card.data.language) == (None, None, None)
    assert card.data.model_name == TASK_CARDS[task].title
    assert json.dumps(card.data.to_dict(), allow_nan=False)
    assert f"\n# {TASK_CARDS[task].title}\n" in card.text
    assert f"A `{RESULTS[task]['architecture']}` of 1,234,567 parameters, fine-tuned with regard.\n" in card.text
    assert "Data: local files; 5,432 rows" in card.text
    assert "On 1,501 held-out rows:" in card.text
    # Nothing is left of the template, and no two empty lines follow each other.
    assert not re.search(r"{%|%}|{{|\n\n\n", card.text)
    assert card.text.endswith("of the same source, not for other text.\n")


def number_of(cell: str) -> tuple[float, float]:
    """The number that a cell holds, and half a unit of its last digit."""
    scale = 100 if cell.endswith("%") else 1
    mantissa, _, exponent = cell.rstrip("%").partition("e")
    digits = len(mantissa.partition(".")[2])
    return float(cell.rstrip("%")) / scale, 0.5001 * 10 ** (int(exponent or 0) - digits) / scale


@pytest.mark.parametrize("task", RESULTS)
def test_every_figure_of_the_table_is_that_of_its_metric(task):
    metrics = dict(RESULTS[task]["metrics"])
    card = model_card(RESULTS[task], OURS)
    found = table(card, "figure")
    for figure, (label, value, *baseline) in zip(TASK_CARDS[task].figures, found, strict=True):
        assert label == figure.label
        number, precision = number_of(value)
        assert number == pytest.approx(metrics.pop(figure.metric), abs=precision)
        if figure.baseline is not None:
            name, described = figure.baseline
            value, told = baseline[0].split(maxsplit=1)
            number, precision = number_of(value)
            assert number == pytest.approx(metrics.pop(name), abs=precision)
            assert told == f"({described})"
    if task == "tokens":
        for kind, value in table(card, "type of span"):
            number, precision = number_of(value)
            assert number == pytest.approx(metrics.pop(f"f1_{kind}"), abs=precision)
    # All that was measured is told; the loss of a regression is its error.
    assert set(metrics) == ({"loss"} if task == "regression" else set())


@pytest.mark.parametrize("task", RESULTS)
def test_the_metadata_holds_the_metrics(task):
    metrics = RESULTS[task]["metrics"]
    card = model_card(RESULTS[task], OURS)
    figures = [figure for figure in TASK_CARDS[task].figures if figure.hub]
    assert len(figures) == len(TASK_CARDS[task].figures) - (task != "regression")
    for figure, result in zip(figures, card.data.eval_results, strict=True):
        assert (result.metric_type, result.metric_name) == figure.hub
        # An error that rounds to nothing is told all the same.
        assert result.metric_value == pytest.approx(metrics[figure.metric], abs=5e-5)
        assert result.metric_value != 0
        assert result.task_type == PIPELINES[task]
        assert result.dataset_name == "held-out rows of local files"
    names = [figure.hub for figure in figures]
    assert len(set(names)) == len(names)


def test_tags_that_mark_no_spans():
    metrics = {"accuracy": 0.75, "accuracy_baseline": 0.5, "loss": 0.5}
    results = {**RESULTS["tokens"], "metrics": metrics, "data": {"rows": 8, "held_out_rows": 2, "labels": {"NOUN": 3}}}
    card = model_card(results, OURS)
    figures = [["words tagged right", "75.0%", "50.0% (the most frequent tag)"], ["loss, nats", "0.500", ""]]
    assert table(card, "figure") == figures
    assert "type of span" not in card.text
    assert "by words tagged right: that of step" in card.text
    assert "aggregation_strategy" not in card.text
    assert "Each tag is that of 3 words." in card.text


# What it says


@pytest.mark.parametrize(
    ("task", "told", "counted"),
    [
        (
            "classification",
            "classifies texts into 3 classes: house, music, water.",
            "label is that of 17 to 1,234 rows",
        ),
        ("multi-label", "any number of 3 labels: house, music, water.", "label is that of 17 to 1,234 rows"),
        ("tokens", "with one of 3 tags: B-LOC, B-PER, O.", "tag is that of 58 to 132 words"),
        ("regression", "predicts a number for a text; the mean in its training data is 0.401.", None),
        ("question-answering", "the part of a text that answers a question.", None),
        ("multiple-choice", "chooses the right one of several texts", None),
    ],
)
def test_what_the_model_does_and_its_labels(task, told, counted):
    text = model_card(RESULTS[task], OURS).text
    assert told in text
    assert (f"Each {counted}." in text) if counted else ("Each " not in text)


def test_many_labels():
    labels = {f"class {number}": number for number in range(52)}
    text = card_with("classification", data={"labels": labels}).text
    assert "into 52 classes: class 0, class 1," in text
    assert "class 49 and 2 more." in text
    assert "class 50" not in text


@pytest.mark.parametrize(
    "nasty", ["a | b", "`code`", "two\nlines", "<b>bold</b>", "**x** _y_ [z](http://a.b)", "{{ 7 }}"]
)
def test_labels_are_text_whatever_they_hold(nasty):
    words = " ".join(nasty.split())
    text = card_with("classification", data={"labels": {nasty: 3, "other": 4}}).text
    (line,) = (line for line in text.splitlines() if "2 classes:" in line)
    assert re.sub(r"\\(.)", r"\1", line).endswith(f"2 classes: {words}, other.")
    assert not re.search(r"(?<!\\)[`*_<>\[\]|]", line)
    text = card_with("tokens", metrics={f"f1_{nasty}": 0.5}).text
    (line,) = (line for line in text.splitlines() if line.endswith("| 50.0% |"))
    assert re.sub(r"\\(.)", r"\1", line) == f"| {words} | 50.0% |"
    assert not re.search(r"(?<!\\)[`*_<>\[\]]", line)


def test_how_it_was_trained():
    settings = {"batch_size": 24, "learning_rate": 3e-5, "warmup": 0.06, "weight_decay": 0.02, "seed": 7}
    text = card_with("classification", settings, epoch=2.5).text
    assert "- 1,600 steps of 24 rows, 2.5 epochs, in 321 seconds on cpu, precision float32.\n" in text
    assert "is kept, by accuracy: that of step 1,200.\n" in text
    assert "learning rate 3e-05, linear schedule with 6% warm-up, weight decay 0.02, seed 7.\n" in text
    assert "Versions: torch 2.13.0, transformers 5.24.0." in text
    assert "LoRA" not in text
    assert "best" not in card_with("classification", best_step=None).text
    other = {"precision": "bf16", "max_length": 64, "metric": "loss", "lora": 4, "lora_targets": ["up", "down"]}
    text = card_with("classification", other, epoch=1.0).text
    assert "rows of at most 64 tokens, 1 epoch, in 321 seconds on cpu, precision bf16." in text
    assert "is kept, by `loss`: that of step 1,200.\n" in text
    assert "- LoRA of rank 4 on `up`, `down`, merged into the weights.\n" in text
    assert "- LoRA of rank 4, merged" in card_with("classification", {"lora": 4}).text


def test_the_learning_rate_that_is_taken_if_none_is_given():
    (option,) = (field for field in fields(FinetuneSettings) if field.name == "learning_rate")
    usual, with_lora = re.findall(r"[\d.]+e-\d+", option.metadata["help"])
    assert f"learning rate {float(usual):g}," in card_with("classification").text
    assert f"learning rate {float(with_lora):g}," in card_with("classification", {"lora": 2}).text


def test_windows_and_questions_without_an_answer():
    text = card_with("question-answering").text
    assert "5,432 rows in 4,321 windows.\n" in text
    assert "1,600 steps of 32 windows," in text
    text = card_with("question-answering", data={"unanswerable": 1_111}).text
    assert "in 4,321 windows, 1,111 of them without an answer." in text
    assert "answers a question, or that none does." in text


def test_what_was_amiss_with_the_rows():
    warnings = {"data": {"empty": 1_003, "truncated": 5}, "validation": {"not_aligned": 2}}
    text = card_with("classification", data={"warnings": warnings}).text
    assert "Of the rows 1,003 have an empty text and are left out, 5 are too long and cut.\n" in text
    assert "Of the held-out rows 2 have labels that do not align with the text.\n" in text
    assert "Of the " not in card_with("classification").text.replace("Of the models", "")


def test_limits():
    for task in RESULTS:
        text = card_with(task).text
        assert "It takes up to 99 tokens at a time." in text
        assert "held-out rows also chose the best epoch" in text
        # What stock models take is not always what their configuration holds.
        assert "tokens at a time" not in card_with(task, config=STOCK).text


# How it is loaded


@pytest.mark.parametrize("task", RESULTS)
def test_how_the_model_loads(task):
    ours, stock = card_with(task), card_with(task, config=STOCK)
    for card in (ours, stock):
        code = snippet(card)
        assert ast.parse(code)
        assert '"PATH_OR_ID"' in code
        assert TASK_CARDS[task].auto_class in code or f'pipeline("{PIPELINES[task]}"' in code
    for text in ("import regard", "`trust_remote_code=True`", "`regard export`"):
        assert text in ours.text
        assert text not in stock.text
    assert stock.data.tags == ["regard", "bert"]
    assert not re.search(r"\n\n\n", stock.text)


def test_pairs_of_texts():
    for task in ("classification", "regression", "multi-label"):
        card = card_with(task, {"second_text_column": "second"})
        assert "text_pair" in snippet(card)
        assert re.search("pairs? of texts", card.text)
        assert "text_pair" not in snippet(card_with(task))
    assert "top_k=None" in snippet(card_with("multi-label", {"second_text_column": "second"}))


# Where it comes from


def fill_cache(folder, repo_id: str) -> None:
    """What a client leaves in its cache of a model of the Hub."""
    repo = folder / f"models--{repo_id.replace('/', '--')}"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "snapshots" / "abc" / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")


@pytest.mark.parametrize("model", ["org/some-bert", "bert-base-uncased"])
def test_the_model_that_it_was_made_from(model, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    # As yet it could be a folder that was moved.
    assert card_with("classification", {"model": model}).data.base_model is None
    fill_cache(tmp_path / "cache", model)
    card = card_with("classification", {"model": model})
    assert card.data.base_model == model
    assert f"fine-tuned with regard from\n[`{model}`](https://huggingface.co/{model}).\n" in card.text
    # A folder of that name goes before.
    (tmp_path / model).mkdir(parents=True)
    card = card_with("classification", {"model": model})
    assert model not in card.content


@pytest.mark.parametrize(
    "model",
    [
        "runs/bert",
        "/home/someone/bert",
        "../someone",
        "~/someone/bert",
        "C:\\someone\\bert",
        "someone--s/bert",
        "",
        ".",
    ],
)
def test_a_local_model_is_not_named(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = card_with("classification", {"model": model})
    assert card.data.base_model is None
    assert "huggingface.co" not in card.text
    assert "someone" not in card.content
    assert "runs/bert" not in card.content


@pytest.mark.parametrize("task", RESULTS)
def test_no_local_path_is_in_a_card(task):
    settings = {
        "model": "/home/someone/model",
        "data": ["/home/someone/a.csv", "someone.jsonl", "python-docs"],
        "validation": "/home/someone/held-out.csv",
    }
    content = card_with(task, settings).content
    assert "someone" not in content
    assert "/home" not in content
    # What is built in for some families is a file here.
    assert "Data: local files; 5,432 rows" in content
    assert "held-out rows of local files:" in content


def test_data_of_the_hub():
    settings = {"data": ["org/data:en", "rows.csv"], "split": "train[:50%]", "validation": "org/other"}
    card = card_with("classification", settings)
    assert card.data.datasets == ["org/data"]
    assert "Data: the data set `org/data:en`, local files; split `train[:50%]`, 5,432 rows." in card.text
    assert "On 1,501 held-out rows of the data set `org/other`:" in card.text
    assert card.data.eval_results[0].dataset_name == "held-out rows of the data set org/other"
    assert "split" not in card_with("classification").text
