"""Which checkpoints are kept, and which of them count, whatever became of some."""

from pathlib import Path

import pytest
from accelerate import Accelerator

from regard.training.run.checkpoints import (
    Progress,
    last_whole_checkpoint,
    latest_step,
    list_checkpoints,
    save_checkpoint,
    tidy,
)


@pytest.fixture
def save(tmp_path):
    """Saves a checkpoint of nothing but its progress."""

    def write(step: int, keep_last: int = 9, **known) -> None:
        accelerator = Accelerator(cpu=True)
        save_checkpoint(accelerator, tmp_path, Progress(step=step, **known), keep_last)

    return write


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def test_later_ones_do_not_count_among_the_last(save, tmp_path):
    """They are damaged: to keep them instead would leave nothing to go on from."""
    for step in (2, 4, 6, 8):
        save(step)
    tidy(tmp_path, 4, keep_last=1)
    assert steps_in(tmp_path) == [4, 6, 8]


def test_later_ones_go_once_the_run_has_a_newer_one(save, tmp_path):
    for step in (2, 4, 6):
        save(step)
    (tmp_path / "step-6" / "progress.json").write_text("{")
    assert last_whole_checkpoint(tmp_path).name == "step-4"
    # As a signal has it saved.
    save(5)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert latest_step(tmp_path) == 5


def test_the_best_of_each_that_is_kept_is_kept(save, tmp_path):
    """If the last is damaged, the one before it needs the best that it knew."""
    save(1, best_step=1)
    save(2, best_step=1)
    save(3, best_step=1, keep_last=2)
    save(4, best_step=4, keep_last=2)
    assert steps_in(tmp_path) == [1, 3, 4]
    save(5, best_step=4, keep_last=2)
    assert steps_in(tmp_path) == [4, 5]


@pytest.mark.parametrize("content", ["{", "\x00" * 9])
def test_one_that_is_damaged_is_no_hindrance(save, tmp_path, content):
    for step in (1, 2, 3):
        save(step, best_step=1)
    (tmp_path / "step-2" / "progress.json").write_text(content)
    tidy(tmp_path, 3, keep_last=2)
    assert steps_in(tmp_path) == [1, 2, 3]
    save(4, best_step=1, keep_last=2)
    assert steps_in(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "custom_checkpoint_0.pkl", "a/b"])
def test_one_with_a_file_that_was_not_saved_is_damaged(save, tmp_path, caplog, name):
    """What is there would be loaded."""
    for step in (1, 2):
        save(step)
    assert last_whole_checkpoint(tmp_path).name == "step-2"
    (tmp_path / "step-2" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "step-2" / name).write_bytes(b"")
    assert last_whole_checkpoint(tmp_path).name == "step-1"
    assert f"step-2 is damaged ({name})" in caplog.text
