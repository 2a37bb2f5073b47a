"""A run that is killed at any instant goes on to the same weights; a full disk costs no checkpoint."""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import other
from transformers import modeling_utils

from regard.training import family, files

ROOT = Path(__file__).parents[2]

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

    FILES = [str(ROOT / "training" / f"{name}.py") for name in "checkpoints family files loop origin run".split()]

    def __init__(self, patch, last: int | None = None) -> None:
        self.seen, self._last = 0, last
        prepare = family._prepare

        def traced(*args):
            sys.settrace(self._call)
            return prepare(*args)

        patch.setattr(family, "_prepare", traced)

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
