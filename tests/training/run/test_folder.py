import json
import math

import pytest
import yaml

from regard.training.families.bert import BertSettings
from regard.training.run.folder import load_results, open_run, save_results, save_settings


def open_bert(folder, given=None, resume=False) -> BertSettings:
    return open_run(folder, BertSettings, "bert", given or {}, resume)


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run_folder(tmp_path):
    """A folder that holds a run of 5 steps with a tiny configuration."""
    folder = tmp_path / "run"
    save_settings(folder, "bert", BertSettings(steps=5, config={"hidden_size": 64}, data=["a.txt"]))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_folder_takes_the_settings_given(tmp_path, resume):
    assert open_bert(tmp_path / "new", {"steps": 5}, resume) == BertSettings(steps=5)
    (tmp_path / "empty").mkdir()
    assert open_bert(tmp_path / "empty", {"steps": 6}, resume).steps == 6
    # Nothing is written yet.
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("resume", [False, True])
def test_wrong_settings_are_refused_in_a_new_folder(tmp_path, resume):
    with pytest.raises(ValueError, match="did you mean `steps`"):
        open_bert(tmp_path / "new", {"stepz": 5}, resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_something_else_is_refused(tmp_path, resume):
    (tmp_path / "thesis.txt").write_text("my only copy")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"`output` \(.*\) holds something other than a run"):
        open_bert(tmp_path, resume=resume)
    with pytest.raises(ValueError, match=r"`output` \(.*thesis.txt\) holds something other than a run"):
        open_bert(tmp_path / "thesis.txt", resume=resume)
    assert contents(tmp_path) == before


def test_settings_come_back_as_they_were(run_folder):
    expected = BertSettings(steps=5, config={"hidden_size": 64}, data=["a.txt"])
    assert open_bert(run_folder, resume=True) == expected
    assert open_bert(run_folder, {"steps": 5, "data": "a.txt"}, resume=True) == expected
    saved = yaml.safe_load((run_folder / "settings.yaml").read_text())
    assert saved["family"] == "bert"
    assert saved["precision"] == "no"


def test_every_kind_of_value_comes_back_as_it_was(tmp_path):
    settings = BertSettings(
        data=["ünï.txt", "b: c", "- d"],
        minutes=0.5,
        learning_rate=1e-4,
        validation="0.1",
        streaming=True,
        tokenizer="no",
    )
    save_settings(tmp_path / "run", "bert", settings)
    assert open_bert(tmp_path / "run", resume=True) == settings


def test_another_run_is_not_overwritten(run_folder):
    before = contents(run_folder)
    with pytest.raises(ValueError, match="holds another run: choose another folder, or `resume` to continue it"):
        open_bert(run_folder, {"steps": 5})
    assert contents(run_folder) == before


def test_a_run_does_not_go_on_with_other_settings(run_folder):
    before = contents(run_folder)
    with pytest.raises(ValueError, match="can't go on with other settings") as raised:
        open_bert(run_folder, {"steps": 7, "seed": 0, "batch_size": 4, "config": {"hidden_size": 32}}, resume=True)
    message = str(raised.value)
    assert "`steps` was 5, not 7" in message
    assert "`batch_size` was 32, not 4" in message
    assert "`config` was {'hidden_size': 64}, not {'hidden_size': 32}" in message
    assert "seed" not in message
    assert contents(run_folder) == before


def test_a_run_from_before_there_was_a_setting(run_folder):
    file = run_folder / "settings.yaml"
    file.write_text(file.read_text().replace("keep_last: 2\n", ""))
    assert open_bert(run_folder, {"keep_last": 2}, resume=True).keep_last == 2
    with pytest.raises(ValueError, match="`keep_last` was 2, not 3"):
        open_bert(run_folder, {"keep_last": 3}, resume=True)


def test_a_run_of_another_family_is_refused(run_folder):
    with pytest.raises(ValueError, match="holds a run of 'bert', not of 'decoder'"):
        open_run(run_folder, BertSettings, "decoder", {}, resume=True)


def test_a_settings_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "settings.yaml").write_text("theme: dark\n")
    with pytest.raises(ValueError, match="holds a run of None, not of 'bert'"):
        open_bert(tmp_path, resume=True)


def test_results(tmp_path):
    assert load_results(tmp_path) is None
    results = {"metrics": {"masked_accuracy": 0.25}, "filled": [{"text": "中 [MASK]"}]}
    save_results(tmp_path, results)
    assert load_results(tmp_path) == results
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_figures_that_are_no_number_are_written_as_nothing(tmp_path):
    """However deep they lie."""
    parts = [{"key": 1, "exact_match": math.nan}, (2.5, -math.inf, [math.inf])]
    save_results(tmp_path, {"metrics": {"loss": math.nan}, "parts": parts})
    results = load_results(tmp_path)
    assert math.isnan(results["metrics"]["loss"])
    assert results["parts"] == [{"key": 1, "exact_match": None}, [2.5, None, [None]]]
