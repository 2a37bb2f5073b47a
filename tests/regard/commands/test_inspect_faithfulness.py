"""`regard inspect faithfulness`: runs of each family on what they held out, and mistakes told in one line."""

import pytest
from PIL import Image

import regard
from regard.commands.inspect_faithfulness import held_out_rows, inspect_faithfulness
from regard.loading import for_prediction, load_network


def test_the_face_of_the_package():
    from regard.inspection.faithfulness.faithfulness import faithfulness

    assert regard.faithfulness is faithfulness
    assert "faithfulness" in regard.__all__


@pytest.mark.parametrize("family", ["bert", "decoder", "transformer", "recurrent"])
def test_a_run_of_each_family(command, run_folder, trained, tmp_path, family):
    folder = run_folder if family == "bert" else trained(family)
    file = tmp_path / "faithfulness.png"
    ended = command("inspect", "faithfulness", folder, "--examples", "3", "--output", file)
    assert ended.code == 0, ended.err
    kind = {"transformer": "cross", "recurrent": "alignment"}.get(family, "self")
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"{folder} · {kind} attention, layer ")
    count = 2 if family in ("bert", "decoder") else 3
    assert lines[1].startswith(f"{count} examples: ")
    assert any(line.startswith("Verdict: ") for line in lines)
    assert lines[-1] == f"Drawn in {file}"
    with Image.open(file) as image:
        assert min(image.size) > 300


def test_the_library_does_the_same_and_a_seed_draws_other_examples(run_folder, tmp_path, corpus_folder):
    made = [
        inspect_faithfulness(run_folder, tmp_path / "a.svg", data=corpus_folder, examples=3, seed=seed, head=1)
        for seed in (0, 0, 1)
    ]
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").count("Erasure")
    assert made[0].lines == made[1].lines
    assert made[0].lines != made[2].lines
    assert (made[0].head, len(made[0].examples)) == (1, 3)


def test_what_is_tested_on(run_folder, trained, corpus_folder):
    network, _ = load_network(run_folder, for_prediction)
    assert len(held_out_rows(run_folder, None, network)) == 2
    assert len(held_out_rows(run_folder, corpus_folder, network)) == 10
    # A model that is no run has no data of its own.
    assert len(held_out_rows(run_folder / "model", corpus_folder, network)) == 10
    network, _ = load_network(trained("recurrent"), for_prediction)
    tested = held_out_rows(trained("recurrent"), "dates:de", network)
    from regard.training.builtin.dates import load_dates

    assert set(tested["target"]) <= set(load_dates("test", locales=("de",))["target"])
    assert not set(tested["target"]) & set(load_dates("validation", locales=("de",))["target"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--output", "a.gif"], "`output` (a.gif) must end with .png, .svg or .pdf"),
        (["--examples", "1"], "`examples` (1) must be at least 2"),
        (["--layer", "1"], "`layer` (1) must be 0"),
        (["--head", "2"], "`head` (2) must be 0 to 1"),
        (["--head", "sum"], "`head` ('sum') must be 0 to 1"),
        (["--max-tokens", "2"], "`max_tokens` (2) must be at least 3"),
        (["--data", "no/such/file.txt"], "no/such/file.txt"),
        # Data of another family, which has settings of its own.
        (["--data", "dates"], "`data` ('dates') is not 'python-docs', a file, a folder"),
        (["--seed", "-1"], "`seed` (-1) must be at least 0 and less than 2**32"),
    ],
)
def test_mistakes(refusal, run_folder, tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    assert told in refusal("inspect", "faithfulness", run_folder, *options)
    assert list(tmp_path.iterdir()) == []


def test_texts_that_are_too_short(refusal, run_folder, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("the river", encoding="utf-8")
    told = refusal("inspect", "faithfulness", run_folder, "--data", file, "--output", tmp_path / "a.png")
    assert f"`data` ({file}) has 0 texts of 8 tokens or more" in told


def test_a_package_that_is_missing(refusal, run_folder, monkeypatch, tmp_path):
    from regard.configuration import extras

    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "captum" else True)
    told = refusal("inspect", "faithfulness", run_folder, "--output", tmp_path / "a.png")
    assert told.endswith("tests of faithfulness need captum: pip install 'regard[faithfulness]'")
