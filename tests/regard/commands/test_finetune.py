"""Fine-tuning from the face of the package: the card, what is told at the end, and the command."""

import contextlib
import csv
import inspect
import io
import json
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard

import regard
from regard.commands import finetune as finetuning
from regard.commands.app import FINETUNE_HELP
from regard.commands.train import figure_lines, summary
from regard.sharing.cards import TASK_CARDS
from regard.training.finetuning.finetune import TASKS

ROOT = Path(__file__).parents[3]
WORDS = "river stone water fish house door the a of under near".split()
SHORT = {"epochs": 1.0, "batch_size": 8, "validation": "0.25", "log_with": ["none"]}


def rows_of(task: str) -> list[dict]:
    """A few rows of a kind."""
    rng = random.Random(0)
    rows = []
    for number in range(24):
        words = rng.choices(WORDS, k=rng.randint(4, 9))
        text = " ".join(words)
        answers = {"text": [words[0]], "answer_start": [0]}
        rows.append(
            {
                "classification": {"text": text, "label": ("calm", "wild")[number % 2]},
                "regression": {"text": text, "label": number / 8},
                "multi-label": {"text": text, "label": [["calm"], ["calm", "wild"]][number % 2]},
                "tokens": {"tokens": words, "tags": ["B-WET" if word in WORDS[:4] else "O" for word in words]},
                "question-answering": {"question": "which", "context": text, "answers": answers},
                "multiple-choice": {"text": text, "choices": ["a", "the", "of"], "label": number % 3},
            }[task]
        )
    return rows


def write_rows(path: Path, task: str) -> str:
    path.write_text("\n".join(map(json.dumps, rows_of(task))), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def tuned(run_folder, tmp_path_factory):
    """A run of each task, and what it came to; those asked for alone are made."""

    class Runs(dict):
        def __missing__(self, task):
            AcceleratorState._reset_state(reset_partial_state=True)
            folder = tmp_path_factory.mktemp("someone") / "run"
            data = write_rows(folder.parent / "rows.jsonl", task)
            self[task] = folder, regard.finetune(task, folder, {"model": str(run_folder), "data": data, **SHORT})
            return self[task]

    return Runs()


def test_the_face_of_the_package():
    assert "finetune" in regard.__all__
    assert regard.finetune is finetuning.finetune
    parameters = inspect.signature(regard.finetune).parameters
    assert list(parameters) == ["task", "output", "settings", "resume"]
    assert parameters["resume"].kind is inspect.Parameter.KEYWORD_ONLY


LAZY = """
import sys
import regard

heavy = ("regard.training", "regard.sharing", "datasets", "evaluate", "matplotlib", "peft", "typer")
print([name for name in heavy if name in sys.modules])
print(regard.finetune.__module__, "regard.training" in sys.modules)
"""


def test_fine_tuning_is_imported_when_it_is_asked_for():
    command = [sys.executable, "-c", LAZY]
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert ended.stdout.splitlines() == ["[]", "regard.commands.finetune True"]


def test_the_arguments_go_to_the_training(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(finetuning, "finetune_model", lambda *given, **options: calls.append((given, options)) or {})
    monkeypatch.setattr(finetuning, "describe", lambda results, model: calls.append(model))
    regard.finetune("tokens")
    regard.finetune("tokens", str(tmp_path), {"epochs": 2}, resume=True)
    assert calls == [
        (("tokens", Path("runs/tokens"), None), {"resume": False}),
        Path("runs/tokens/model"),
        (("tokens", tmp_path, {"epochs": 2}), {"resume": True}),
        tmp_path / "model",
    ]


def test_the_command_line_has_every_task():
    assert list(FINETUNE_HELP) == list(TASKS)


def test_no_such_task(tmp_path):
    with pytest.raises(ValueError, match=r"`task` \('translate'\) must be one of classification, regression"):
        regard.finetune("translate", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", TASK_CARDS)
def test_the_card_and_the_summary_of_each_task(task, tuned):
    folder, results = tuned[task]
    assert results == json.loads((folder / "results.json").read_text())
    card = ModelCard.load(folder / "model" / "README.md")
    assert card.data.tags == ["regard", "regard_bert"]
    assert card.data.base_model is None
    assert card.data.eval_results
    told = summary(results, folder / "model")
    assert f"Fine-tuned for {results['step']} steps, 1 epoch, in " in told
    assert "\n".join(figure_lines(results)) in told
    assert "On held-out rows" in told
    # Every figure is that of its metric, in both.
    figures = [figure for figure in TASK_CARDS[task].figures if figure.metric in results["metrics"]]
    assert len(figures) >= 2
    for figure in figures:
        value = figure.form.format(results["metrics"][figure.metric])
        assert f"| {figure.label} | {value} |" in card.text
        (line,) = (line for line in told.splitlines() if line.startswith(f"  {figure.label}  "))
        found = line[len(figure.label) + 2 :].split(maxsplit=2)
        assert found[0] == value
        if figure.baseline:
            name, described = figure.baseline
            assert found[1:] == [figure.form.format(results["metrics"][name]), described]
    for label in results["data"].get("labels", {}) if task != "regression" else ():
        assert label in card.text


@pytest.mark.parametrize("task", TASK_CARDS)
def test_what_the_card_says_of_use_works(task, tuned):
    folder, _ = tuned[task]
    found = example_of(folder / "model")
    if task in ("classification", "multi-label"):
        names = {each["label"] for each in found}
        assert names == {"calm", "wild"} if task == "multi-label" else names <= {"calm", "wild"}
    elif task == "regression":
        assert isinstance(found[0]["score"], float)
    elif task == "tokens":
        assert {each["entity_group"] for each in found} <= {"WET"}
    elif task == "question-answering":
        assert isinstance(found, str)
    else:
        assert found in ("A choice.", "Another.")


def example_of(model: Path):
    """What the example of a card comes to."""
    (code,) = re.findall(r"```python\n(.*?)\n```", (model / "README.md").read_text(), re.DOTALL)
    *before, last = code.replace("PATH_OR_ID", str(model)).splitlines()
    names: dict = {}
    with contextlib.redirect_stderr(io.StringIO()):
        exec("\n".join(before), names)
        return eval(last, names)


@pytest.mark.parametrize("task", TASK_CARDS)
def test_no_local_path_is_in_what_is_shared(task, tuned, run_folder):
    folder, results = tuned[task]
    for path in (folder / "model").iterdir():
        content = path.read_bytes()
        for local in (folder.parent, run_folder, *results["settings"]["data"]):
            assert str(local).encode() not in content
        assert b"someone" not in content


@pytest.mark.parametrize("task", TASK_CARDS)
def test_the_last_line_of_the_summary_loads_the_model(task, tuned):
    folder, results = tuned[task]
    found: dict = {}
    exec(summary(results, folder / "model").splitlines()[-1].strip(), found)
    assert type(found["model"]).__name__ == results["architecture"]


def test_a_stock_model(run_folder, tmp_path):
    config = transformers.BertConfig(
        vocab_size=120, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=14
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "stock")
    transformers.AutoTokenizer.from_pretrained(run_folder / "model").save_pretrained(tmp_path / "stock")
    settings = {"model": str(tmp_path / "stock"), "data": write_rows(tmp_path / "rows.jsonl", "classification")}
    results = regard.finetune("classification", tmp_path / "run", {**settings, **SHORT})
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.tags == ["regard", "bert"]
    assert "import regard" not in card.text
    assert "trust_remote_code" not in card.text
    assert example_of(tmp_path / "run" / "model")[0]["label"] in ("calm", "wild")
    told = summary(results, tmp_path / "run" / "model")
    assert "  import transformers; model = transformers.AutoModelForSequenceClassification." in told


def test_an_edited_card_is_kept(run_folder, tmp_path, caplog):
    settings = {"model": str(run_folder), "data": write_rows(tmp_path / "rows.jsonl", "classification"), **SHORT}
    with caplog.at_level(logging.INFO, logger="regard"):
        results = regard.finetune("classification", tmp_path / "run", settings)
    assert summary(results, tmp_path / "run" / "model") in caplog.messages
    card = tmp_path / "run" / "model" / "README.md"
    written = card.read_text()
    card.write_text("Edited by hand.")
    assert regard.finetune("classification", tmp_path / "run", settings, resume=True) == results
    assert card.read_text() == "Edited by hand."
    # It is written for a run that was killed before it could be.
    card.unlink()
    regard.finetune("classification", tmp_path / "run", settings, resume=True)
    assert card.read_text() == written


def test_the_command(command, run_folder, tmp_path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["text", "label"])
        table.writeheader()
        table.writerows(rows_of("classification"))
    given = ["--model", run_folder, "--data", tmp_path / "rows.csv", "--epochs", 1, "--batch-size", 8]
    ended = command("finetune", "classification", *given, "--log-with", "none", "--output", tmp_path / "run")
    assert ended.code == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for part in ("Fine-tuned for ", "To load it, in Python:", *figure_lines(results)):
        assert part in ended.out
    assert (tmp_path / "run" / "model" / "README.md").exists()
    again = command("finetune", "classification", "--output", tmp_path / "run", "--resume")
    assert again.code == 0
    assert "has already ended" in again.out
