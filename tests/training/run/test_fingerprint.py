"""A run goes on with what it began with, or with what it is told to accept."""

import json
import logging
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig

from regard.training.loop.loop import Loop
from regard.training.run import fingerprint
from regard.training.run.checkpoints import list_checkpoints
from regard.training.run.fingerprint import RunFingerprint, describe_folder, describe_rows

SETTINGS = {"steps": 5, "save_every": 2, "evaluate_every": 0, "log_every": 1}


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture
def data(corpus_folder, tmp_path) -> Path:
    """A corpus of its own, which a test may change."""
    return Path(shutil.copytree(corpus_folder, tmp_path / "corpus"))


@pytest.fixture
def begun(pretrain, tmp_path, data) -> Path:
    """A run that was killed in its third step."""
    whole = Loop._step

    def until(self, *args):
        if self.progress.step == 3:
            raise Killed
        return whole(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", data=[str(data)], **SETTINGS)
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(data: Path) -> None:
    file = sorted(data.iterdir())[3]
    file.write_text(file.read_text()[:-2] + "?.")


def remove(data: Path) -> None:
    sorted(data.iterdir())[3].unlink()


@pytest.mark.parametrize(
    ("change", "told"), [(edit, r"data has the same number of rows"), (remove, r"training data had 9 rows, not 8")]
)
def test_other_data_is_refused_unless_accepted(pretrain, begun, data, change, told):
    before = contents(begun)
    change(data)
    with pytest.raises(ValueError, match=rf"can't go on .*`accept_changes`.*{told}"):
        pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    assert contents(begun) == before
    results = pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **SETTINGS)
    (accepted,) = results["accepted_changes"]
    assert accepted["step"] == 2
    assert any(told.split(" had ")[-1] in change for change in accepted["changes"])
    assert json.loads((begun / "results.json").read_text())["accepted_changes"] == results["accepted_changes"]


def test_the_same_data_elsewhere_is_the_same(pretrain, begun, data, tmp_path, monkeypatch):
    """Also when the files are newer, and the cache is gone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    text = (begun / "settings.yaml").read_text()
    moved = Path(shutil.copytree(data, tmp_path / "moved", copy_function=shutil.copy))
    (begun / "settings.yaml").write_text(text.replace(str(data), str(moved)))
    results = pretrain(begun, resume=True, data=[str(moved)], **SETTINGS)
    assert "accepted_changes" not in results


def test_another_tokenizer_is_refused_unless_accepted(pretrain, begun, data):
    file = begun / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text().replace("\n", " \n", 1))
    with pytest.raises(ValueError, match="the tokenizer in the folder has been changed"):
        pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    results = pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **SETTINGS)
    assert results["accepted_changes"] == [{"step": 2, "changes": ["the tokenizer in the folder has been changed"]}]


def test_another_model_is_refused_unless_accepted(pretrain, begun, data):
    """As a default that has changed since would make it."""
    file = begun / "origin.json"
    saved = json.loads(file.read_text())
    saved["model"]["layer_norm_eps"] = 0.5
    file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"the model's `layer_norm_eps` was 0.5, not 1e-12"):
        pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    results = pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **SETTINGS)
    assert results["accepted_changes"][0]["changes"] == ["the model's `layer_norm_eps` was 0.5, not 1e-12"]


def test_other_settings_that_are_accepted_hold_from_then_on(pretrain, begun, data, caplog):
    other = {**SETTINGS, "steps": 6, "learning_rate": 0.25}
    with pytest.raises(
        ValueError,
        match=r"other settings \(`accept_changes` allows it\): `learning_rate` was .*; `steps` was 5, not 6",
    ):
        pretrain(begun, resume=True, data=[str(data)], **other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **other)
    assert "goes on from step 2 with what it did not begin with: `learning_rate` was" in caplog.text
    assert "; `steps` was 5, not 6" in caplog.text
    # Now they are the run's settings, and need not be accepted again.
    results = pretrain(begun, resume=True, data=[str(data)], **other)
    assert (results["step"], results["settings"]["learning_rate"]) == (6, 0.25)
    assert [accepted["step"] for accepted in results["accepted_changes"]] == [2]


def test_all_that_was_accepted_is_recorded(pretrain, begun, data):
    """One after the other; and the versions stay those of the beginning."""
    file = begun / "origin.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"versions": {"torch": "1.0"}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", lambda *args: 1 / 0)
        for steps in (6, 7):
            with pytest.raises(ZeroDivisionError):
                pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **{**SETTINGS, "steps": steps})
    found = json.loads(file.read_text())
    assert found["versions"] == {"torch": "1.0"}
    assert [accepted["changes"] for accepted in found["accepted"]] == [
        ["`steps` was 5, not 6"],
        ["`steps` was 6, not 7"],
    ]


def test_settings_are_not_changed_before_that_is_recorded(pretrain, begun, data):
    before = (begun / "settings.yaml").read_bytes()

    def kill(*args):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFingerprint, "save", kill)
        with pytest.raises(Killed):
            pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **{**SETTINGS, "steps": 6})
    assert (begun / "settings.yaml").read_bytes() == before


def test_a_run_that_has_ended_takes_no_other_settings(pretrain, begun, data):
    pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    before = contents(begun)
    with pytest.raises(ValueError, match=r"has already ended, .*: without its results.json it goes on"):
        pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **{**SETTINGS, "steps": 6})
    assert contents(begun) == before


def test_a_model_that_the_checkpoint_does_not_fit(pretrain, begun, data):
    with pytest.raises(ValueError, match=r"step-2 does not fit the model: .*size mismatch") as raised:
        pretrain(
            begun,
            resume=True,
            accept_changes=True,
            data=[str(data)],
            **{**SETTINGS, "config": {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}},
        )
    assert "\n" not in str(raised.value)


def test_other_versions_are_told_of(pretrain, begun, data, caplog):
    file = begun / "origin.json"
    saved = json.loads(file.read_text())
    saved["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(saved))
    pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    assert f"may not go on to the bit: torch was 1.0, not {torch.__version__}." in caplog.text


def test_nothing_is_told_where_nothing_has_changed(pretrain, begun, data, caplog):
    before = (begun / "origin.json").read_bytes()
    results = pretrain(begun, resume=True, accept_changes=True, data=[str(data)], **SETTINGS)
    assert "accepted_changes" not in results
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (begun / "origin.json").read_bytes() == before


def test_a_run_from_before_this_was_written(pretrain, begun, data):
    expected = json.loads((begun / "origin.json").read_text())
    (begun / "origin.json").unlink()
    pretrain(begun, resume=True, data=[str(data)], **SETTINGS)
    assert json.loads((begun / "origin.json").read_text()) == {**expected, "accepted": []}


# What a digest depends on


def rows_of(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def test_rows_are_known_by_what_they_hold():
    texts = [f"text {number}" for number in range(1000)]
    rows = rows_of(text=texts, source=["a"] * 1000)
    found = describe_rows(rows)
    assert found["rows"] == 1000
    # However they lie on disk, wherever they were read from.
    halves = [rows_of(text=texts[:300], source=["b"] * 300), rows_of(text=texts[300:], source=["c"] * 700)]
    assert describe_rows(datasets.concatenate_datasets(halves)) == found
    shuffled = rows.select(np.random.default_rng(0).permutation(1000))
    assert describe_rows(shuffled)["digest"] != found["digest"]
    assert describe_rows(shuffled.select(np.argsort(np.random.default_rng(0).permutation(1000)))) == found
    for place in (0, 255, 256, 999):
        other = [*texts[:place], "other", *texts[place + 1 :]]
        assert describe_rows(rows_of(text=other, source=["a"] * 1000))["digest"] != found["digest"]


def test_where_one_text_ends_matters():
    assert describe_rows(rows_of(a=["xy"], b=["z"])) != describe_rows(rows_of(a=["x"], b=["yz"]))
    assert describe_rows(rows_of(source=["x"], target=["y"])) != describe_rows(rows_of(source=["z"], target=["y"]))
    assert describe_rows(rows_of(a=["x"])) != describe_rows(rows_of(b=["x"]))


def test_of_many_rows_some_are_looked_at(monkeypatch):
    monkeypatch.setattr(fingerprint, "SAMPLED_ROWS", 10)
    texts = [str(number) for number in range(95)]
    found = describe_rows(rows_of(text=texts))
    changed = {
        place
        for place in range(95)
        if describe_rows(rows_of(text=[*texts[:place], "x", *texts[place + 1 :]])) != found
    }
    assert changed == {0, 9, 19, 28, 38, 47, 57, 66, 76, 85}
    assert describe_rows(rows_of(text=texts[:-1])) != found


@pytest.mark.parametrize("embedded", [True, False])
def test_images(tmp_path, embedded):
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})

    def rows(folder: str, color: int, size: int = 3) -> datasets.Dataset:
        path = tmp_path / folder / "a.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (size, size), color).save(path)
        image = {"bytes": path.read_bytes(), "path": None} if embedded else str(path)
        return datasets.Dataset.from_dict({"image": [image], "text": ["a"]}, features=features)

    found = describe_rows(rows("one", 1))
    assert describe_rows(rows("other", 1)) == found
    assert describe_rows(rows("one", 1, size=99)) != found


def test_a_folder_is_known_by_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    found = [describe_folder(tmp_path)]
    for name, text in [("x", "1"), ("a/x", "1"), ("y", ""), ("x", "2")]:
        (tmp_path / name).write_text(text)
        found.append(describe_folder(tmp_path))
    assert len(set(found)) == 5


def test_the_held_out_data_is_told_apart(tmp_path):
    rows, held_out = rows_of(text=["a", "b", "c"]), rows_of(text=["d", "e"])
    begun = RunFingerprint.take(rows, held_out, tmp_path, BertConfig())
    now = RunFingerprint.take(rows, rows_of(text=["d", "f"]), tmp_path, BertConfig())
    assert begun.changes(now) == ["the held-out data has the same number of rows (2), but different ones"]


def test_what_differs_is_named():
    config = BertConfig(num_hidden_layers=1)
    begun = {
        "data": {"training": {"rows": 1000, "digest": "a"}, "held-out": {"rows": 2, "digest": "b"}},
        "tokenizer": "c",
        "model": {"hidden_size": config.hidden_size, "gone": 1},
        "versions": {"torch": "2"},
    }
    now = json.loads(json.dumps(begun))
    before, same = RunFingerprint(**begun), RunFingerprint(**now)
    assert before.changes(same) == before.version_changes(same) == []
    now["data"]["training"]["rows"] = 1001
    now["data"]["held-out"]["digest"] = "d"
    now["tokenizer"] = "e"
    now["model"] = {"hidden_size": 3, "new": None, "newer": 7}
    now["versions"] = {"torch": "3", "datasets": "5"}
    assert before.changes(RunFingerprint(**now)) == [
        "the training data had 1,000 rows, not 1,001",
        "the held-out data has the same number of rows (2), but different ones",
        "the tokenizer in the folder has been changed",
        "the model's `gone` was 1, not None",
        "the model's `hidden_size` was 768, not 3",
        "the model's `newer` was None, not 7",
    ]
    assert before.version_changes(RunFingerprint(**now)) == ["torch was 2, not 3", "datasets was None, not 5"]


def test_nothing_is_written_of_a_run_that_is_refused(pretrain, tmp_path, data):
    with pytest.raises(ValueError, match="fewer than one batch"):
        pretrain(tmp_path / "run", data=[str(data)], batch_size=1000)
    assert not (tmp_path / "run").exists()
    assert list_checkpoints(tmp_path / "run") == []
