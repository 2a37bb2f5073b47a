"""The commands that work with a trained model."""

import json
import shutil
from pathlib import Path

import pytest

from regard.commands.generate import generate_text
from regard.commands.train import figure_lines

# Filling


def test_masks_are_filled(command, run_folder):
    ended = command("fill", "the [MASK] of the [MASK]", "--model", run_folder, "--top", "2")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["[MASK] 1", "[MASK] 2"]
    assert [len(line.split()) for line in lines if line.startswith(" ")] == [2] * 4
    shares = [float(line.split()[0].rstrip("%")) for line in lines if line.startswith(" ")]
    assert shares[0] >= shares[1] > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no mask"], "has no [MASK]"),
        (["a [MASK]", "--top", "0"], "`top` (0) must be at least 1"),
        (["a " * 40 + "[MASK]"], "`max_position_embeddings`"),
    ],
)
def test_filling_that_cannot_be(refusal, run_folder, arguments, expected):
    assert expected in refusal("fill", *arguments, "--model", run_folder)


def test_filling_without_a_model(refusal, tmp_path):
    assert "holds no model" in refusal("fill", "a [MASK]", "--model", tmp_path)
    assert "nowhere" in refusal("fill", "a [MASK]", "--model", tmp_path / "nowhere")


# Generating


def test_a_text_goes_on(command, decoder_folder):
    ended = command("generate", "The river", "--model", decoder_folder, "--seed", "3", "--max-new-tokens", "8")
    assert ended.code == 0
    assert ended.out == generate_text("The river", decoder_folder, seed=3, max_new_tokens=8) + "\n"
    assert ended.out.startswith("The river")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--no-sample"], {"sample": False}),
        (["--sample"], {}),
        (["--beams", "3"], {"beams": 3}),
        (["--temperature", "3.5"], {"temperature": 3.5}),
        (["--top-k", "2"], {"top_k": 2}),
        (["--top-p", "0.2"], {"top_p": 0.2}),
    ],
)
def test_options_of_generating(command, decoder_folder, arguments, options):
    given = ["The river", "--model", decoder_folder, "--seed", "3"]
    expected = generate_text("The river", decoder_folder, seed=3, **options)
    assert command("generate", *given, *arguments).out == expected + "\n"
    assert (expected == generate_text("The river", decoder_folder, seed=3)) == (not options)


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_a_source_is_rewritten(command, trained, family):
    ended = command("generate", "the river", "--model", trained(family), "--beams", "2")
    assert ended.code == 0
    assert ended.out == generate_text("the river", trained(family), beams=2) + "\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["  "], "`prompt` is empty"),
        (["=" * 40], "`prompt` has 41 tokens, and the model has room for 32"),
        (["a", "--temperature", "0"], "`temperature` (0.0) must be at least 1e-06"),
        (["a", "--top-p", "1.5"], "`top_p` (1.5) must be more than 0 and at most 1"),
        (["a", "--top-k", "-1"], "`top_k` (-1) must be at least 0"),
        (["a", "--beams", "0"], "`beams` (0) must be at least 1"),
        (["a", "--max-new-tokens", "0"], "`max_new_tokens` (0) must be at least 1"),
        (["a", "--seed", "-1"], "`seed` (-1) must be at least 0"),
    ],
)
def test_generating_that_cannot_be(refusal, decoder_folder, arguments, expected):
    assert expected in refusal("generate", *arguments, "--model", decoder_folder)


def test_generating_without_a_model(refusal, run_folder, tmp_path):
    assert "holds no model" in refusal("generate", "a", "--model", tmp_path)
    assert "nowhere" in refusal("generate", "a", "--model", tmp_path / "nowhere")
    assert "is a 'regard_bert', but only" in refusal("generate", "a", "--model", run_folder)


# Evaluating


@pytest.mark.parametrize("family", ["bert", "decoder", "transformer", "recurrent"])
def test_the_figures_of_a_run_are_found_again(command, trained, run_folder, tmp_path, family):
    folder = run_folder if family == "bert" else trained(family)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    ended = command("evaluate", folder, "--output", tmp_path / "figures.json")
    assert ended.code == 0
    found = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    results = json.loads((folder / "results.json").read_text())
    assert found["family"] == family
    assert found["metrics"] == pytest.approx(results["metrics"], rel=1e-6)
    assert found["data"] == results["data"]
    assert found.get("filled") == results.get("filled")
    if "generated" in results:
        assert found["generated"][: len(results["generated"])] == results["generated"]
    assert "\n".join(figure_lines(found)) in ended.out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_other_data_is_evaluated_on(command, decoder_folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Zzyzx! " * 40)
    figures = {}
    for name, model, more in (
        ("own", decoder_folder, []),
        ("other", decoder_folder, ["--data", other]),
        ("model", decoder_folder / "model", ["--data", other]),
    ):
        assert command("evaluate", model, *more, "--output", tmp_path / name).code == 0
        figures[name] = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    assert figures["other"]["metrics"]["loss"] != figures["own"]["metrics"]["loss"]
    assert figures["other"]["data"]["held_out_documents"] == 1
    # The model by itself gives the same loss, but the baseline is another's.
    assert figures["model"]["metrics"]["loss"] == pytest.approx(figures["other"]["metrics"]["loss"], rel=1e-6)
    assert figures["model"]["metrics"]["perplexity_unigram"] < figures["other"]["metrics"]["perplexity_unigram"]


def test_settings_of_an_evaluation(command, decoder_folder, trained, tmp_path):
    def figures(folder: Path, *more: str) -> dict:
        assert command("evaluate", folder, *more, "--output", tmp_path / "figures.json").code == 0
        return json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))

    whole = figures(decoder_folder)["metrics"]["loss"]
    assert figures(decoder_folder, "--setting", "batch_size=3")["metrics"]["loss"] == pytest.approx(whole, rel=1e-5)
    shorter = figures(decoder_folder, "--setting", "max_length=9", "--setting", "batch_size=3")["metrics"]["loss"]
    assert shorter != pytest.approx(whole, rel=1e-5)
    pairs = figures(trained("transformer"), "--batches", "1")
    assert len(pairs["generated"]) == 8
    assert len(figures(trained("transformer"))["generated"]) == pairs["data"]["held_out_pairs"] > 8


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "nowhere.txt"], "('nowhere.txt') is not"),
        (["--batches", "0"], "`evaluation_batches` (0) must be at least 1"),
        (["--setting", "batch_sise=3"], "there is no setting `batch_sise`: did you mean `batch_size`?"),
        (["--setting", "batch_size"], "`setting` ('batch_size') must be NAME=VALUE"),
        (["--setting", "batch_size=[3"], "`setting` ('batch_size=[3') has a value that is not YAML"),
        (["--setting", "batch_size=few"], "`batch_size` ('few') must be a whole number"),
        (["--setting", "max_length=99"], "`max_length` (99) is more than `max_position_embeddings` (32)"),
    ],
)
def test_an_evaluation_that_cannot_be(refusal, decoder_folder, tmp_path, arguments, expected):
    assert expected in refusal("evaluate", decoder_folder, *arguments, "--output", tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists()


def test_evaluating_without_a_model_or_data(refusal, decoder_folder, tmp_path):
    assert "nowhere" in refusal("evaluate", tmp_path / "nowhere")
    assert "holds no model" in refusal("evaluate", tmp_path)
    assert "is not a run, so it has no held-out data: name `data`" in refusal("evaluate", decoder_folder / "model")


def test_a_run_that_has_not_ended_is_not_evaluated(refusal, decoder_folder, tmp_path):
    shutil.copytree(decoder_folder, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    assert "holds no model: the run may not have ended" in refusal("evaluate", tmp_path / "run")
