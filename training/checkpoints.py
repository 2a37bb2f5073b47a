"""Run checkpoints: the whole state of a run, written beside and renamed in, so that each is whole or not there."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator
from huggingface_hub.utils.sha import sha_fileobj

logger = logging.getLogger("regard.training")

_STATE_FILE, _CHECKSUM_FILE = "progress.json", "checksums.json"
_PREFIX = "step-"


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        epoch: number of the epoch.
        step_in_epoch: steps done in it.
        seconds: time spent in training.
        tokens: tokens seen, padding not counted.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    tokens: int = 0


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / _STATE_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _checksums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint, by its place in it."""
    sums = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != _CHECKSUM_FILE:
            with path.open("rb") as file:
                sums[path.relative_to(checkpoint).as_posix()] = sha_fileobj(file).hex()
    return sums


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose files are as they were saved; what is passed over is logged."""
    for partial in folder.glob("partial-*"):
        logger.warning("The checkpoint %s was not saved to its end, and is left out.", partial)
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            expected = json.loads((checkpoint / _CHECKSUM_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            expected = {_CHECKSUM_FILE: ""}
        found = _checksums(checkpoint)
        damaged = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if not damaged:
            return checkpoint
        logger.warning("The checkpoint %s is damaged (%s), and is left out.", checkpoint, ", ".join(damaged))
    return None


def save_checkpoint(accelerator: Accelerator, folder: Path, progress: Progress, keep_last: int) -> None:
    """Saves weights, optimizer, random state and progress, and then deletes all but the last checkpoints.

    Args:
        accelerator: holds what is prepared for training. Every process must call this.
        folder: of the checkpoints.
        progress: where the run stands.
        keep_last: number of checkpoints to keep.
    """
    final = folder / f"{_PREFIX}{progress.step}"
    partial = folder / f"partial-{progress.step}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    if accelerator.is_main_process:
        (partial / _STATE_FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        (partial / _CHECKSUM_FILE).write_text(json.dumps(_checksums(partial), indent=2), encoding="utf-8")
        for path in partial.rglob("*"):
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _flush(folder)
        for old in list_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def _flush(path: Path) -> None:
    # Without this, a machine that loses power can keep the new name and lose the content.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> Progress:
    """Restores what `save_checkpoint` saved, and tells where the run stood."""
    accelerator.load_state(str(checkpoint))
    return Progress(**json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8")))
