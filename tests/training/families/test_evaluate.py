"""Evaluating a trained model again, or on other data."""

import json
import logging
import re
import shutil
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState

from regard.training.families import evaluate as evaluation
from regard.training.families.evaluate import evaluate_model
from regard.training.generation.text_metrics import chrf, exact_match
from regard.training.run.folder import SETTINGS_FILE

FAMILIES = ("transformer", "recurrent")
OTHER = [("en_US: 1/5/1987", "1987-01-05"), ("de: 24. Februar 2085", "2085-02-24"), ("x", "y"), ("z" * 200, "w")]


@pytest.fixture(scope="module", params=FAMILIES)
def run(request, train_pairs, tmp_path_factory):
    """The folder of a run that has learned a little."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train_pairs(request.param, folder, steps=12, learning_rate=0.01, label_smoothing=0.1)
    return folder


@pytest.fixture(scope="module")
def bert_run(pretrain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert") / "run"
    pretrain(folder, steps=3)
    return folder


@pytest.fixture
def other(write_pairs) -> str:
    return write_pairs("other", OTHER)


def results_of(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def told(results: dict, expected: dict) -> dict:
    """What a run's results tell of what an evaluation tells too; those of a run show fewer of the texts."""
    names = results.keys() & expected.keys()
    return {name: expected[name] for name in names}


def test_a_run_gives_the_figures_that_it_ended_with(run):
    expected, results = results_of(run), evaluate_model(run)
    assert results["generated"][:5] == expected["generated"]
    assert len(results["generated"]) == 8
    assert results | {"generated": expected["generated"]} == told(results, expected)
    assert results.keys() == {"family", "metrics", "data", "by_target_words", "by_source_length", "generated"}


def test_a_run_of_bert_does_so_too(bert_run):
    expected, results = results_of(bert_run), evaluate_model(str(bert_run))
    assert results == told(results, expected)
    assert results.keys() == {"family", "metrics", "data", "filled"}


def test_an_evaluation_leaves_nothing_behind(run, other):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    evaluate_model(run, other)
    evaluate_model(run / "model", other)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_precision_is_the_runs(precision, train_pairs, tmp_path):
    # Accelerate keeps that of a process's first run, which this module's runs may have been.
    AcceleratorState._reset_state(reset_partial_state=True)
    train_pairs("transformer", tmp_path / "run", precision=precision)
    assert evaluate_model(tmp_path / "run")["metrics"] == results_of(tmp_path / "run")["metrics"]


def test_other_data_is_evaluated_whole(run, other, caplog):
    results = evaluate_model(run, other)
    assert [(row["source"], row["target"]) for row in results["generated"]] == OTHER
    predictions, references = [row["prediction"] for row in results["generated"]], [target for _, target in OTHER]
    assert results["metrics"]["exact_match"] == exact_match(predictions, references)
    assert results["metrics"]["chrf"] == chrf(predictions, references)
    assert results["metrics"]["loss"] != results_of(run)["metrics"]["loss"]
    # One source is longer than the run's examples: it has no loss, but it is an example like any other.
    assert results["data"]["held_out_pairs"] == 3
    assert results["data"]["pairs"] == results_of(run)["data"]["pairs"]
    assert "1 of 4 pairs are longer than `max_length` (90) and left out." in caplog.messages


def test_a_model_by_itself_gives_what_its_run_gives(run, other, tmp_path):
    shutil.copytree(run / "model", tmp_path / "model")
    own = {"max_length": 90, "batch_size": 8}
    results, expected = evaluate_model(tmp_path / "model", other, own), evaluate_model(run, other)
    assert results["family"] == expected["family"]
    assert results["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert results["generated"] == expected["generated"]
    # It knows no training data, so that of the evaluation is all there is.
    assert results["data"]["pairs"] == results["data"]["held_out_pairs"] == 3


def test_a_transformer_by_itself_knows_how_far_its_positions_reach(train_pairs, write_pairs, tmp_path, caplog):
    train_pairs("transformer", tmp_path / "run", max_dates=1, max_length=50, steps=1)
    results = evaluate_model(tmp_path / "run" / "model", write_pairs("long", [("de: 1", "d"), ("d" * 60, "d")]))
    assert results["data"]["held_out_pairs"] == 1
    assert len(results["generated"]) == 2
    assert "1 of 2 pairs are longer than `max_length` (50) and left out." in caplog.messages


@pytest.mark.parametrize("next_sentence", [True, False])
def test_bert_by_itself_knows_its_objectives(next_sentence, pretrain, corpus_folder, tmp_path):
    pretrain(tmp_path / "run", next_sentence=next_sentence, steps=2)
    own = {"max_length": 32, "batch_size": 12}
    results = evaluate_model(tmp_path / "run" / "model", corpus_folder, own)
    expected = evaluate_model(tmp_path / "run", corpus_folder)
    assert ("next_sentence_accuracy" in results["metrics"]) == next_sentence
    for name in ("masked_loss", "masked_accuracy"):
        assert results["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-6)


def test_settings_go_before_those_of_the_run(run):
    first, more = evaluate_model(run), evaluate_model(run, settings={"evaluation_batches": 3})
    assert len(more["generated"]) == 24
    assert more["generated"][:8] == first["generated"]
    assert more["metrics"] != first["metrics"]
    test = evaluate_model(run, "dates:en_US,de", {"split": "test"})
    assert {row["target"] for row in test["generated"]}.isdisjoint(row["target"] for row in more["generated"])
    assert evaluate_model(run, "dates:en_US,de")["metrics"] == first["metrics"]


def test_trackers_are_left_alone(run):
    assert evaluate_model(run, settings={"log_with": ["nonsense"]})["metrics"] == results_of(run)["metrics"]


# What goes wrong


def refused(complaint: str, *args) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        evaluate_model(*args)


def test_there_is_no_model(tmp_path):
    refused(f"`model` ({tmp_path}) holds no model", tmp_path)
    refused(f"`model` ({tmp_path / 'none'}) is no folder here", tmp_path / "none", "dates")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / SETTINGS_FILE).write_text("family: recurrent\n")
    refused("the run may not have ended", tmp_path / "begun")


def test_a_model_by_itself_needs_data(run):
    model = run / "model"
    refused(f"`model` ({model}) is not a run, so it has no held-out data: name `data`", model)


@pytest.mark.parametrize("model_type", ["bert", "regard_unknown", "recurrent"])
def test_a_model_of_another_family(model_type, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    found = SimpleNamespace(model_type=model_type)
    monkeypatch.setattr(evaluation.AutoConfig, "from_pretrained", lambda path, **options: found)
    refused(f"`model` ({tmp_path}) is a {model_type!r}, none of bert, ", tmp_path, "dates")


def test_a_run_of_another_family(run, tmp_path):
    shutil.copytree(run / "model", tmp_path / "model")
    for text, kind in (("family: unknown\n", "'regard_unknown'"), ("steps: 1\n", "'regard_None'")):
        (tmp_path / SETTINGS_FILE).write_text(text)
        refused(f"is a {kind}, none of bert, ", tmp_path)


def test_a_setting_that_there_is_not(run):
    refused("there is no setting `beems`: did you mean `beams`?", run, None, {"beems": 3})
    refused("`beams` (0) must be at least 1", run, None, {"beams": 0})


def test_data_that_there_is_not(run, tmp_path):
    refused("unknown locale, 'xx'", run, "dates:xx")
    refused("none.csv", run, str(tmp_path / "none.csv"))


def test_an_evaluation_says_what_it_read(run, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        evaluate_model(run)
    assert any("held out: 2,000 pairs" in message for message in caplog.messages)
