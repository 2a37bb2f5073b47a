"""A run that is killed, wherever that may be, and goes on, ends as the one that was not."""

import itertools
import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from regard.training.loop.loop import Loop
from regard.training.run import files
from regard.training.run.checkpoints import last_whole_checkpoint, list_checkpoints
from tests.support.fresh import run_python

ROOT = Path(__file__).parents[3]

# About three steps an epoch, so that the run ends in its third. Dropout, accumulation, evaluations and checkpoints
# whose steps sometimes coincide.
STEPS = 8
SETTINGS = {"steps": STEPS, "accumulation": 2, "save_every": 2, "evaluate_every": 3, "log_every": 1, "dropout": 0.2}


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture(scope="module")
def straight(pretrain, tmp_path_factory):
    """A run that nothing interrupts, and what it came to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, pretrain(folder, **SETTINGS)


@pytest.fixture
def same_as_straight(straight, weights_of, history_of):
    """Checks that a run ended as the straight one, to the bit."""

    def check(folder: Path, results: dict) -> None:
        expected_folder, expected = straight
        assert results["metrics"] == expected["metrics"]
        assert results["filled"] == expected["filled"]
        assert (results["step"], results["epoch"], results["tokens"]) == tuple(
            expected[name] for name in ("step", "epoch", "tokens")
        )
        weights, expected_weights = weights_of(folder), weights_of(expected_folder)
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        # The evaluation at the end has no checkpoint after it, and may be recorded twice.
        records = history_of(folder)
        assert records[:-1] + [record for record in records[-1:] if record not in records[:-1]] == history_of(
            expected_folder
        )

    return check


def kill_after(monkeypatch, step: int) -> None:
    whole = Loop._step

    def until(self, *args):
        result = whole(self, *args)
        if self.progress.step == step:
            raise Killed
        return result

    monkeypatch.setattr(Loop, "_step", until)


def test_the_straight_run_is_worth_comparing_to(straight, history_of):
    folder, results = straight
    assert (results["step"], results["epoch"]) == (STEPS, 2)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-6", "step-8"]
    steps = {
        kind: [step for step, other, _ in history_of(folder) if other == kind] for kind in ("train", "evaluation")
    }
    assert steps == {"train": list(range(1, STEPS + 1)), "evaluation": [3, 6, 8]}


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_after_any_step(pretrain, tmp_path, same_as_straight, step):
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, step)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


def test_killed_again_and_again(pretrain, tmp_path, same_as_straight):
    for step in (3, 5, 5, 6, 7):
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, step)
            with pytest.raises(Killed):
                pretrain(tmp_path / "run", resume=True, **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True))


@pytest.mark.parametrize(
    "moment",
    [
        "regard.training.families.train.Loop.__init__",
        "regard.training.loop.loop.Loop._train",
        "regard.training.loop.loop.Loop.evaluate",
        "regard.training.families.bert.fill_examples",
        "regard.training.families.train.save_results",
    ],
)
def test_killed_at_other_moments(pretrain, tmp_path, same_as_straight, moment):
    def kill(*args, **kwargs):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment, kill)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


def test_killed_in_an_evaluation_at_a_step_that_is_saved(pretrain, tmp_path, same_as_straight):
    whole = Loop.evaluate

    def kill(self):
        if self.progress.step == 6:
            raise Killed
        return whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "evaluate", kill)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


@pytest.mark.parametrize("file", ["settings.yaml", "origin.json", "history.jsonl", "results.json"])
def test_killed_while_a_file_is_written(pretrain, tmp_path, same_as_straight, file):
    whole = Path.write_text

    def torn(self, text, **options):
        if file in self.name:
            whole(self, text[:20], **options)
            raise Killed
        return whole(self, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", torn)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


def test_killed_while_the_tokenizer_is_written(pretrain, tmp_path, same_as_straight):
    from transformers import BertTokenizer

    def torn(self, folder, **options):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "tokenizer_config.json").write_text("{}")
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BertTokenizer, "save_pretrained", torn)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


@pytest.mark.parametrize(("saved", "file"), [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)])
def test_killed_while_a_checkpoint_is_written(pretrain, tmp_path, same_as_straight, saved, file, caplog):
    """Any of the files of a checkpoint is torn: weights, optimizer, random state, progress, checksums."""
    flushed = itertools.count()

    def torn(path):
        is_part = path.parent.name.startswith("partial-") and path.parent.parent.name == "checkpoints"
        if is_part and next(flushed) == 5 * saved + file:
            path.write_bytes(path.read_bytes()[:20])
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "flush", torn)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    kept = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-2"] * saved
    with caplog.at_level(logging.INFO, logger="regard"):
        results = pretrain(tmp_path / "run", resume=True, **SETTINGS)
    assert (f"Going on from step {2 * saved}." in caplog.messages) == bool(saved)
    same_as_straight(tmp_path / "run", results)
    assert not list((tmp_path / "run" / "checkpoints").glob("partial*"))


def test_the_disk_is_full(pretrain, tmp_path, same_as_straight):
    def full(accelerator, folder, *args):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.Accelerator.save_state", full)
        told = r"step 6 could not be written to .*: No space left on device; that of step 4 is kept"
        with pytest.raises(OSError, match=told):
            pretrain(tmp_path / "run", resume=True, **SETTINGS)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2", "step-4"]
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


KILLED = """
import os, signal, sys, yaml
from regard.training.families.bert import BERT
from regard.training.families.train import train
from regard.training.loop.loop import Loop

whole = Loop._step
def until(self, *args):
    result = whole(self, *args)
    if self.progress.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
Loop._step = until
train(BERT, sys.argv[1], yaml.safe_load(sys.argv[2]))
"""


def test_a_process_that_is_really_killed(straight, pretrain, tmp_path, same_as_straight):
    settings = (straight[0] / "settings.yaml").read_text().replace("family: bert\n", "")
    assert run_python(KILLED, ROOT, str(tmp_path / "run"), settings).returncode == -signal.SIGKILL
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2", "step-4"]
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True))


def test_a_run_that_has_ended_is_not_run_again(pretrain, tmp_path, straight, weights_of):
    results = pretrain(tmp_path / "run", steps=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", lambda *args: pytest.fail("it trains"))
        assert pretrain(tmp_path / "run", resume=True, steps=2) == results
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_resuming_starts_a_run_that_is_not_there(pretrain, tmp_path, same_as_straight):
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


@pytest.mark.parametrize(
    ("save_every", "keep_last", "kept"), [(1, 1, [7]), (1, 3, [5, 6, 7]), (3, 9, [3, 6]), (0, 2, [])]
)
def test_the_last_checkpoints_are_kept(pretrain, tmp_path, save_every, keep_last, kept):
    pretrain(tmp_path / "run", steps=7, evaluate_every=0, save_every=save_every, keep_last=keep_last)
    found = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == [f"step-{step}" for step in kept]


def test_checkpoints_are_listed_by_their_number(tmp_path):
    for name in ("step-9", "step-10", "step-100", "partial-11", "step-12"):
        (tmp_path / name).mkdir()
        if name != "step-12":
            (tmp_path / name / "progress.json").write_text("{}")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert list_checkpoints(tmp_path / "none") == []


def test_checkpoints_hold_no_tensor_twice(pretrain, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        pretrain(tmp_path / "run", steps=1, save_every=1)
    with safe_open(tmp_path / "run" / "checkpoints" / "step-1" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "bert.embeddings.tokens.weight" in names
    assert "masked_lm_head.decoder.weight" not in names
    # Nor is the user told of it each time.
    assert caplog.messages == []


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, alter, Path.unlink])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "progress.json", "checksums.json"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(straight, tmp_path, caplog, name, damage):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(straight[0] / "checkpoints", checkpoints)
    assert last_whole_checkpoint(checkpoints) == checkpoints / "step-8"
    assert not caplog.records
    damage(checkpoints / "step-8" / name)
    assert last_whole_checkpoint(checkpoints) == checkpoints / "step-6"
    # Without the file that marks it whole, a checkpoint is none.
    if (name, damage) != ("progress.json", Path.unlink):
        (record,) = caplog.records
        assert str(checkpoints / "step-8") in record.getMessage()


def test_resuming_past_a_damaged_checkpoint_ends_in_the_same_weights(pretrain, tmp_path, same_as_straight):
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 7)
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", **SETTINGS)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    cut(newest / "optimizer.bin")
    same_as_straight(tmp_path / "run", pretrain(tmp_path / "run", resume=True, **SETTINGS))


def test_an_unfinished_save_is_named(tmp_path, caplog):
    (tmp_path / "partial-4").mkdir()
    assert last_whole_checkpoint(tmp_path) is None
    assert "partial-4 was not saved completely" in caplog.text
