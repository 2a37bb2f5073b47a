"""A run that is killed at any instant goes on to the same weights; a full disk costs no checkpoint."""

import errno
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.utils import other
from safetensors import SafetensorError
from transformers import modeling_utils

from regard.training.families import train
from regard.training.loop.loop import Loop
from regard.training.loop.run_keeper import Keeper
from regard.training.run import checkpoints, files
from regard.training.run.checkpoints import last_whole_checkpoint, list_checkpoints
from tests.support.thorough import slow_except

ROOT = Path(__file__).parents[3]

# Two saves, the second of which replaces the first, and one of the two evaluations is at a save.
SETTINGS = {"steps": 5, "save_every": 2, "keep_last": 1, "evaluate_every": 2, "log_every": 1, "dropout": 0.2}


class Killed(BaseException):
    """What no code catches."""


@pytest.fixture(scope="module")
def straight(pretrain, tmp_path_factory):
    """A run that nothing interrupts, and what it came to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, pretrain(folder, **SETTINGS)


@pytest.fixture
def same_as_straight(straight, weights_of, history_of):
    def check(folder: Path, results: dict) -> None:
        expected_folder, expected = straight
        assert {**results, "seconds": 0} == {**expected, "seconds": 0}
        weights, expected_weights = weights_of(folder), weights_of(expected_folder)
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        # The evaluation at the end has no checkpoint after it, and may be recorded twice.
        records = history_of(folder)
        found = [record for number, record in enumerate(records) if record not in records[:number]]
        assert found == history_of(expected_folder)
        for name in ("settings.yaml", "origin.json"):
            assert (folder / name).read_text() == (expected_folder / name).read_text()
        for name in ("tokenizer", "model"):
            assert {path.name: path.read_bytes() for path in (folder / name).iterdir()} == {
                path.name: path.read_bytes() for path in (expected_folder / name).iterdir()
            }
        assert {path.name for path in folder.iterdir()} == {path.name for path in expected_folder.iterdir()}
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-4"]

    return check


# At any line


class Lines:
    """Counts the lines that the code of a run passes once it may write, and kills it at one of them."""

    NAMES = "families/train loop/run_keeper loop/loop run/checkpoints run/files run/fingerprint run/folder".split()
    FILES = [str(ROOT / "training" / f"{name}.py") for name in NAMES]

    def __init__(self, patch, last: int | None = None) -> None:
        self.seen, self._last = 0, last
        prepare = train._prepare

        def traced(*args):
            sys.settrace(self._call)
            return prepare(*args)

        patch.setattr(train, "_prepare", traced)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in self.FILES else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.seen += 1
            if self.seen == self._last:
                sys.settrace(None)
                raise Killed
        return self._line


@pytest.mark.slow
def test_killed_at_random_lines(pretrain, tmp_path, same_as_straight, monkeypatch):
    tracer = sys.gettrace()
    try:
        with pytest.MonkeyPatch.context() as patch:
            lines = Lines(patch)
            pretrain(tmp_path / "whole", **SETTINGS)
            sys.settrace(tracer)
        assert lines.seen > 500
        for case, number in enumerate(random.Random(0).sample(range(1, lines.seen), 20)):
            folder = tmp_path / str(case)
            with pytest.MonkeyPatch.context() as patch:
                Lines(patch, number)
                with pytest.raises(Killed):
                    pretrain(folder, **SETTINGS)
            same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))
    finally:
        sys.settrace(tracer)


# At any operation on the disk


class Disk:
    """Counts what is done on the disk, and lets one of the operations go wrong.

    Args:
        patch: is undone by the test.
        fails: number of the operation, from 1.
        torn: whether half of it is done before.
        error: that it ends in.
        only: whether an operation counts, by its name and the path.
    """

    def __init__(self, patch, fails=None, torn=False, error=Killed, only=lambda name, path: True) -> None:
        self.done, self._fails, self._torn, self._error, self._only = [], fails, torn, error, only

        def half_of_file(path) -> None:
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[: len(content) // 2])

        def half_of_folder(path, *args, **options) -> None:
            for file in sorted(Path(path).rglob("*"))[::2]:
                if file.is_file():
                    file.unlink()

        def half_of_text(path, text, **options) -> None:
            write_text(path, text[: len(text) // 2], **options)

        def half_of_save(save):
            def write(content, path, *args, **options) -> None:
                save(content, path, *args, **options)
                half_of_file(path)

            return write

        write_text = Path.write_text
        for owner, name, place, torn_half in (
            (files, "flush", 0, None),
            (os, "replace", 1, None),
            (shutil, "rmtree", 0, half_of_folder),
            (Path, "unlink", 0, None),
            (Path, "mkdir", 0, None),
            (Path, "write_text", 0, half_of_text),
            (torch, "save", 1, half_of_save(torch.save)),
            (other, "safe_save_file", 1, half_of_save(other.safe_save_file)),
            (modeling_utils, "safe_save_file", 1, half_of_save(modeling_utils.safe_save_file)),
        ):
            patch.setattr(owner, name, self._counted(name, getattr(owner, name), place, torn_half))

    def _counted(self, name, whole, place, torn_half):
        def operation(*args, **options):
            path = str(args[place])
            if not self._only(name, path):
                return whole(*args, **options)
            self.done.append((name, path))
            if len(self.done) == self._fails:
                if self._torn and torn_half is not None:
                    torn_half(*args, **options)
                raise self._error
            return whole(*args, **options)

        return operation


def operations(pretrain, folder: Path, **options) -> list[tuple[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, **options)
        pretrain(folder, **SETTINGS)
    return disk.done


def of_the_run(folder: Path):
    """Not of the cache of data, which is another matter."""
    return lambda name, path: path.startswith(str(folder))


def of_the_second_save(name: str, path: str) -> bool:
    return "partial-4" in path or "step-" in path or path.endswith("checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_each_operation_on_the_disk(pretrain, tmp_path, same_as_straight, torn):
    done = operations(pretrain, tmp_path / "whole", only=of_the_run(tmp_path / "whole"))
    names = [name for name, _ in done]
    # Two checkpoints with two files of torch's each, and their weights; the weights of the model.
    assert (names.count("save"), names.count("safe_save_file")) == (4, 3)
    assert {"flush", "replace", "rmtree", "mkdir", "write_text"} <= set(names)
    for number in range(1, len(done) + 1):
        folder = tmp_path / str(number)
        if torn and names[number - 1] in ("flush", "replace", "unlink", "mkdir"):
            continue
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number, torn, only=of_the_run(folder))
            with pytest.raises(Killed):
                pretrain(folder, **SETTINGS)
        same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))
        shutil.rmtree(folder)


def test_a_torn_line_of_the_history(pretrain, tmp_path, same_as_straight):
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keeper, "load_best", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(folder, **SETTINGS)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "tra')
    same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))


@pytest.mark.slow
def test_processes_that_are_really_killed(pretrain, tmp_path, weights_of):
    """At random moments, most of which are in a save."""
    settings = {**SETTINGS, "steps": 80, "save_every": 1, "evaluate_every": 0}
    results = pretrain(tmp_path / "straight", **settings)
    text = (tmp_path / "straight" / "settings.yaml").read_text().replace("family: bert\n", "")
    (tmp_path / "settings.yaml").write_text(text)
    folder, rng = tmp_path / "run", random.Random(0)
    command = [sys.executable, "-m", "regard", "train", "bert", "--settings", str(tmp_path / "settings.yaml")]
    reached = []
    for _ in range(4):
        process = subprocess.Popen(
            [*command, "--output", str(folder), "--resume"], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        before = [path.name for path in list_checkpoints(folder / "checkpoints")]
        while [path.name for path in list_checkpoints(folder / "checkpoints")] == before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
        reached.append(checkpoints.latest_step(folder / "checkpoints"))
    assert reached == sorted(set(reached))
    assert reached[-1] < 80
    resumed = pretrain(folder, resume=True, **settings)
    assert {**resumed, "seconds": 0} == {**results, "seconds": 0}
    weights, expected = weights_of(folder), weights_of(tmp_path / "straight")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# A full disk


def failures_of_a_full_disk() -> list:
    """How each library tells of it."""
    return [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"),
    ]


# With every change one error for each half of the writes.
FAILING = [(number, last) for number in range(3) for last in (False, True)]


@pytest.mark.parametrize(("number", "last"), slow_except([(0, False), (1, True)], FAILING))
def test_each_write_of_a_save_can_fail(pretrain, tmp_path, same_as_straight, number, last):
    """The earlier checkpoint stands, what is half written is removed, and one line tells both."""
    error = failures_of_a_full_disk()[number]
    done = operations(pretrain, tmp_path / "whole", only=of_the_second_save)
    writes = [number for number, (name, path) in enumerate(done, start=1) if "partial-4" in path and name != "replace"]
    names = [done[number - 1][0] for number in writes]
    assert names[:4] == ["mkdir", "safe_save_file", "save", "save"]
    for number in writes[len(writes) // 2 :] if last else writes[: len(writes) // 2]:
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, number, torn=True, error=error, only=of_the_second_save)
            told = "the checkpoint of step 4 could not be written to .*/checkpoints: .*; that of step 2 is kept"
            with pytest.raises(OSError, match=told) as raised:
                pretrain(folder, **SETTINGS)
        assert "\n" not in str(raised.value)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
        assert last_whole_checkpoint(folder / "checkpoints").name == "step-2"
    same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))


def test_before_there_is_a_checkpoint(pretrain, tmp_path):
    error = OSError(errno.ENOSPC, "No space left")
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, 1, error=error, only=lambda name, path: name == "save")
        with pytest.raises(OSError, match=r"step 2 could not be written .*: No space left; there is no earlier one"):
            pretrain(tmp_path / "run", **SETTINGS)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(pretrain, tmp_path, weights_of, straight, caplog):
    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "set_aside", refuse)
        pretrain(tmp_path / "run", **SETTINGS)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2", "step-4"]
    assert "step-2 could not be deleted: [Errno 13] Permission denied" in caplog.text
    weights, expected = weights_of(tmp_path / "run"), weights_of(straight[0])
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("partial-settings.yaml", "the beginning of the run"),
        ("partial-origin.json", "the beginning of the run"),
        ("partial-history.jsonl", "history.jsonl"),
        ("partial-model/model.safetensors", "the trained model"),
        ("partial-results.json", "the results"),
    ],
)
def test_other_files_that_do_not_fit(pretrain, tmp_path, same_as_straight, part, told):
    folder = tmp_path / "run"
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, 1, torn=True, error=error, only=lambda name, path: path.startswith(str(folder / part)))
        with pytest.raises(OSError, match=f"{told} could not be written to {folder}: No space left on device$"):
            pretrain(folder, **SETTINGS)
    same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted and mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("share", [0, 0.03, 0.2, 0.5, 0.7, 0.9, 0.99])
def test_a_disk_that_is_really_full(pretrain, small_disk, straight, same_as_straight, share):
    """There is room for a share of a checkpoint."""
    folder, filler = small_disk / "run", small_disk / "filler"
    size = sum(path.stat().st_size for path in (straight[0] / "checkpoints" / "step-4").iterdir())
    whole = Loop._save

    def filled(self):
        if self.progress.step == 4:
            filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - int(share * size)))
        whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_save", filled)
        told = "step 4 could not be written to .*: .*No space left on device.*; that of step 2 is kept"
        with pytest.raises(OSError, match=told):
            pretrain(folder, **SETTINGS)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
    filler.unlink()
    same_as_straight(folder, pretrain(folder, resume=True, **SETTINGS))


# What is loaded


class Code:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "random_states_0.pkl", "pytorch_model.bin", "custom_checkpoint_0.pkl"]
)
@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_checkpoint_runs_no_code(pretrain, tmp_path, name, how):
    """Not even one whose checksums are right."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_save", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(folder, **SETTINGS)
    checkpoint = folder / "checkpoints" / "step-4"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    if how == "pickle":
        (checkpoint / name).write_bytes(pickle.dumps(Code(mark)))
    else:
        torch.save({"state": Code(mark)}, checkpoint / name)
    (checkpoint / "checksums.json").write_text(json.dumps(checkpoints._checksums(checkpoint)))
    with pytest.raises(ValueError, match=r"step-4 (may run code when it is loaded|does not fit)"):
        pretrain(folder, resume=True, **SETTINGS)
    assert not mark.exists()
    # It would have.
    pickle.loads(pickle.dumps(Code(mark)))
    assert mark.exists()


def test_a_checkpoint_of_other_processes_is_told_of(pretrain, tmp_path, caplog):
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_save", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(folder, **SETTINGS)
    checkpoint = folder / "checkpoints" / "step-4"
    shutil.copy(checkpoint / "random_states_0.pkl", checkpoint / "random_states_1.pkl")
    (checkpoint / "checksums.json").write_text(json.dumps(checkpoints._checksums(checkpoint)))
    with caplog.at_level(logging.INFO, logger="regard"):
        pretrain(folder, resume=True, **SETTINGS)
    assert "was saved by 2 processes, not 1" in caplog.text
