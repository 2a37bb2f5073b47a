import ast
import contextlib
import inspect
import io
import json
import logging
import re

import pytest
from huggingface_hub import ModelCard
from PIL import Image

import regard
from regard.commands import train
from regard.commands.train import figure_lines, summary, train_bert, train_model
from regard.training.families.recipes import TRAINABLE
from tests.support.families import FAMILY_CARDS

FAMILIES = ["bert", "decoder", "transformer", "recurrent", "captioner"]


@pytest.fixture
def results(run_folder) -> dict:
    return json.loads((run_folder / "results.json").read_text())


@pytest.fixture(scope="session")
def tiny_of(tiny) -> dict:
    """Settings of runs of each family that take no time."""
    short = {"steps": 2, "batch_size": 8, "evaluation_batches": 1, "log_with": ["none"], "save_every": 0}
    pairs = {**short, "data": ["dates:en_US,de"], "max_pairs": 60}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return {
        "bert": tiny,
        "decoder": {**tiny, "vocab_size": 300},
        "transformer": {**pairs, "config": sizes},
        "recurrent": {**pairs, "config": {"hidden_size": 16}},
        "captioner": {**short, "max_images": 40, "config": {"hidden_size": 16}},
    }


@pytest.fixture(scope="session")
def runs(tiny_of, tmp_path_factory) -> dict:
    """A run of each family, and what it came to; those asked for alone are made."""

    class Runs(dict):
        def __missing__(self, family):
            folder = tmp_path_factory.mktemp(family) / "run"
            self[family] = folder, train_model(family, folder, tiny_of[family])
            return self[family]

    return Runs()


def test_the_face_of_the_package():
    names = [name for name in regard.__all__ if name.startswith("train_")]
    assert "train_bert" in names
    for name in names:
        assert getattr(regard, name) is getattr(train, name)


def test_every_family_can_be_trained_and_described():
    assert list(TRAINABLE) == list(FAMILY_CARDS) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_a_function(family, tiny_of, tmp_path, monkeypatch):
    function = getattr(train, f"train_{family}")
    assert repr(family) in inspect.getdoc(function)
    assert list(inspect.signature(function).parameters) == ["output", "settings", "resume", "accept_changes"]
    calls = []
    monkeypatch.setattr(train, "train", lambda *arguments, **options: calls.append((arguments, options)) or {})
    monkeypatch.setattr(train, "write_card", lambda model, results: None)
    monkeypatch.setattr(train, "summary", lambda results, model: "")
    function()
    function(tmp_path, {"steps": 1}, resume=True, accept_changes=True)
    function(output=str(tmp_path), settings={})
    assert calls == [
        ((TRAINABLE[family], train.Path("runs", family), None), {"resume": False, "accept_changes": False}),
        ((TRAINABLE[family], tmp_path, {"steps": 1}), {"resume": True, "accept_changes": True}),
        ((TRAINABLE[family], tmp_path, {}), {"resume": False, "accept_changes": False}),
    ]


def test_a_family_that_there_is_not():
    with pytest.raises(ValueError, match=r"`family` \('gpt'\) must be one of bert, decoder, transformer, recurrent"):
        train_model("gpt")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_card_and_the_summary_of_each_family(family, runs):
    folder, results = runs[family]
    assert results == json.loads((folder / "results.json").read_text())
    card = ModelCard.load(folder / "model" / "README.md")
    assert card.data.eval_results
    assert card.data.tags[1] == f"regard_{family}"
    told = summary(results, folder / "model")
    # Every figure is that of its metric, in both.
    for figure in FAMILY_CARDS[family].figures:
        value = figure.form.format(results["metrics"][figure.metric])
        assert f"| {figure.label} | {value} |" in card.text
        (line,) = (line for line in told.splitlines() if line.startswith(f"  {figure.label}  "))
        found = line[len(figure.label) + 2 :].split()
        assert found[0] == value
        if figure.baseline:
            name, described = figure.baseline
            assert found[1] == figure.form.format(results["metrics"][name])
            assert line.endswith(f"  {described}")
    assert "\n".join(figure_lines(results)) in told


@pytest.mark.parametrize("family", FAMILIES)
def test_no_local_path_is_in_what_is_shared(family, runs, corpus_folder):
    folder, _ = runs[family]
    for path in (folder / "model").iterdir():
        content = path.read_bytes()
        assert str(folder.parent).encode() not in content
        assert corpus_folder.encode() not in content


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_card_says_of_use_works(family, runs, tmp_path):
    folder, results = runs[family]
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "model" / "README.md").read_text(), re.DOTALL)
    Image.new("L", (30, 20), 200).save(tmp_path / "image.png")
    code = code.replace("PATH_OR_ID", str(folder / "model")).replace("IMAGE_FILE", str(tmp_path / "image.png"))
    *before, last = ast.parse(code).body
    found: dict = {}
    with contextlib.redirect_stderr(io.StringIO()):
        exec(compile(ast.Module(before, []), "card", "exec"), found)
        value = eval(compile(ast.Expression(last.value), "card", "eval"), found)
    if family in ("transformer", "recurrent"):
        # The sources are tried in batches, which changes nothing.
        assert value == [results["generated"][0]["prediction"]]
    elif family == "decoder":
        assert value[0]["generated_text"].startswith(results["generated"][0]["prompt"])
    elif family == "captioner":
        assert isinstance(value[0], str)
    else:
        # Of the five guesses the first three are those of the card.
        guesses = [guess["token_str"] for guess in value]
        assert len(guesses) == 5
        assert guesses[:3] == results["filled"][0]["guesses"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_line_of_the_summary_loads_the_model(family, runs):
    folder, results = runs[family]
    found: dict = {}
    with contextlib.redirect_stderr(io.StringIO()):
        exec(summary(results, folder / "model").splitlines()[-1].strip(), found)
    architecture = results["architecture"].replace("ForPreTraining", "ForMaskedLM")
    assert type(found["model"]).__name__ == architecture


def test_the_examples_of_a_summary(runs):
    def told(family: str, **example: str) -> list[str]:
        return figure_lines({**runs[family][1], "generated": [example]})[-2:]

    assert told("decoder", prompt="It is", continuation="\n a {cat}.") == ["  It is", "    a {cat}."]
    for family in ("transformer", "recurrent"):
        lines = told(family, source="de: 1.2.2003", target="2003-02-01", prediction="2003-01-02")
        assert lines == ["  de: 1.2.2003", "    2003-01-02  (should be: 2003-02-01)"]
    assert told("captioner", target="letter a", prediction="letter e")[1] == "  letter e  (should be: letter a)"


def test_a_card_lies_beside_the_model(run_folder, results, corpus_folder):
    card = ModelCard.load(run_folder / "model" / "README.md")
    figures = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert figures["accuracy"] == pytest.approx(results["metrics"]["masked_accuracy"], abs=1e-4)
    assert corpus_folder not in card.content
    assert str(run_folder) not in card.content


def test_nothing_shared_names_a_local_path(run_folder, corpus_folder):
    for path in (run_folder / "model").iterdir():
        content = path.read_bytes()
        assert str(run_folder.parent).encode() not in content
        assert corpus_folder.encode() not in content


def test_the_result_is_that_of_the_run(tmp_path, tiny, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        results = train_bert(tmp_path / "run", tiny)
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())
    assert summary(results, tmp_path / "run" / "model") in caplog.messages


def test_an_edited_card_is_kept(tmp_path, tiny):
    results = train_bert(tmp_path / "run", tiny)
    card = tmp_path / "run" / "model" / "README.md"
    card.write_text("Edited by hand.")
    assert train_bert(tmp_path / "run", tiny, resume=True) == results
    assert card.read_text() == "Edited by hand."
    # It is written for a run that was killed before it could be.
    card.unlink()
    train_bert(tmp_path / "run", tiny, resume=True)
    assert "# BERT" in card.read_text()


def test_the_summary(results, tmp_path):
    metrics = {
        "masked_accuracy": 0.41236,
        "masked_accuracy_baseline": 0.0789,
        "masked_loss": 3.14159,
        "masked_loss_unigram": 6.5,
        "next_sentence_accuracy": 0.876,
        "next_sentence_baseline": 0.512,
    }
    filled = [{"text": "The [MASK] sat.", "word": "cat", "guesses": ["dog", "cow", "##s"]}]
    results = {**results, "metrics": metrics, "filled": filled, "step": 1_234, "tokens": 5_678_901, "seconds": 3_210.4}
    lines = summary(results, tmp_path).splitlines()
    assert "Trained for 1,234 steps, 5,678,901 tokens, in 3,210 seconds." in lines
    figures = [[word for word in line.split() if "." in word] for line in lines if "7.9%" in line or "6.500" in line]
    assert figures == [["41.2%", "7.9%"], ["3.142", "6.500"]]
    (next_sentences,) = (line for line in lines if "next sentences" in line)
    assert [word for word in next_sentences.split() if "%" in word] == ["87.6%", "51.2%"]
    assert lines[lines.index("  The [MASK] sat.") + 1] == "    dog, cow, ##s  (was: cat)"
    del metrics["next_sentence_accuracy"], metrics["next_sentence_baseline"]
    shorter = summary({**results, "filled": []}, tmp_path)
    assert "next sentences" not in shorter
    assert "[MASK]" not in shorter


def test_the_last_line_is_python_whatever_the_folder_is_called(results, tmp_path):
    line = summary(results, tmp_path / 'it\'s "here"\\').splitlines()[-1]
    compile(line.strip(), "line", "exec")
