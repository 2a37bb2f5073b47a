"""Run checkpoints: the whole state of a run, written beside and renamed in, so that each is whole or not there."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from accelerate import Accelerator
from accelerate.utils.other import load
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError

from ...modeling.loading.folder import read_json
from .files import OLD, PARTIAL, attempt, delete_leftovers, not_written, rename_in, set_aside
from .settings import make_settings

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
        skipped_steps: how many of the steps changed no weights, as their loss or gradient was not finite.
        best_step: the step of the best evaluation, if the best is to be kept.
        best_loss: the loss at it.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    skipped_steps: int = 0
    best_step: int | None = None
    best_loss: float | None = None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / _STATE_FILE).is_file()]
    return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdecimal()), key=_number)


def latest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a folder; 0 if there is none."""
    found = list_checkpoints(folder)
    return _number(found[-1]) if found else 0


def checkpoint_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step, whether it is there or not."""
    return folder / f"{_PREFIX}{step}"


def _checksums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint, by its place in it."""
    sums = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != _CHECKSUM_FILE:
            with path.open("rb") as file:
                sums[path.relative_to(checkpoint).as_posix()] = sha_fileobj(file).hex()
    return sums


def is_whole(checkpoint: Path) -> bool:
    """Whether the files of a checkpoint are as they were saved; what is not is logged."""
    try:
        expected = read_json(checkpoint, _CHECKSUM_FILE, str(checkpoint))
    except (OSError, ValueError):
        expected = {_CHECKSUM_FILE: ""}
    found = _checksums(checkpoint)
    damaged = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if damaged:
        logger.warning("The checkpoint %s is damaged (%s), and is left out.", checkpoint, ", ".join(damaged))
    return not damaged


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose files are as they were saved; what is passed over is logged."""
    for partial in folder.glob(f"{PARTIAL}*"):
        logger.warning("The checkpoint %s was not saved to its end, and is left out.", partial)
    return next((checkpoint for checkpoint in reversed(list_checkpoints(folder)) if is_whole(checkpoint)), None)


def save_checkpoint(accelerator: Accelerator, folder: Path, progress: Progress, keep_last: int) -> None:
    """Saves weights, optimizer, random state and progress, and then deletes what need not be kept.

    Kept are the last checkpoints, and the one of the best evaluation that each of them knows.

    Args:
        accelerator: holds what is prepared for training. Every process must call this.
        folder: of the checkpoints.
        progress: where the run stands.
        keep_last: number of checkpoints to keep.

    Raises:
        OSError: in every process, if one could not write its part. The earlier checkpoints are as they were.
    """
    partial = folder / f"{PARTIAL}{progress.step}"
    main = accelerator.is_main_process
    failure = attempt(lambda: _make_room(folder, partial)) if main else None
    # The processes agree before each part, so that none waits for one that has failed.
    if _all_did(accelerator, failure):
        failure = attempt(lambda: accelerator.save_state(str(partial)))
    if _all_did(accelerator, failure) and main:
        failure = attempt(lambda: _finish(partial, checkpoint_of(folder, progress.step), progress))
    if not _all_did(accelerator, failure):
        earlier = list_checkpoints(folder)
        stands = f"; the one of step {_number(earlier[-1])} stands" if earlier else "; there is none before it"
        error = not_written(f"the checkpoint of step {progress.step}", folder, failure, stands)
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise error from failure
    if main:
        for checkpoint in list_checkpoints(folder):
            # It is damaged: the run would else have gone on from it.
            if _number(checkpoint) > progress.step:
                _delete(checkpoint)
        tidy(folder, progress.step, keep_last)


def tidy(folder: Path, step: int, keep_last: int) -> None:
    """Deletes what was left half written or half deleted, and the checkpoints that need not be kept.

    Args:
        folder: of the checkpoints.
        step: of the last checkpoint that counts; later ones are left alone.
        keep_last: number of checkpoints to keep, beside the one of the best evaluation that each of them knows.
    """
    for prefix in (PARTIAL, OLD):
        delete_leftovers(folder, prefix)
    known = [path for path in list_checkpoints(folder) if _number(path) <= step]
    kept = set(known[-keep_last:])
    kept |= {checkpoint_of(folder, best) for best in map(_best_step, kept) if best is not None}
    for checkpoint in known:
        if checkpoint not in kept:
            _delete(checkpoint)


def _delete(checkpoint: Path) -> None:
    failure = attempt(lambda: shutil.rmtree(set_aside(checkpoint)))
    if failure is not None:
        logger.warning("The checkpoint %s could not be deleted: %s", checkpoint, failure)


def _all_did(accelerator: Accelerator, failure: Exception | None) -> bool:
    """Whether no process failed, once all have come here."""
    if accelerator.num_processes == 1:
        return failure is None
    failed = torch.tensor([int(failure is not None)], device=accelerator.device)
    return int(accelerator.reduce(failed)[0]) == 0


def _make_room(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in (PARTIAL, OLD):
        delete_leftovers(folder, prefix)
    partial.mkdir()


def _finish(partial: Path, final: Path, progress: Progress) -> None:
    (partial / _STATE_FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")
    (partial / _CHECKSUM_FILE).write_text(json.dumps(_checksums(partial), indent=2), encoding="utf-8")
    rename_in(partial, final)


def _best_step(checkpoint: Path) -> int | None:
    try:
        return _read_progress(checkpoint).best_step
    except ValueError:
        # A damaged one knows none.
        return None


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> Progress:
    """Restores what `save_checkpoint` saved, and tells where the run stood.

    Another number of processes than saved it can load it too; then dropout is not what it would have been.

    Raises:
        ValueError: if the checkpoint does not fit the model, or holds what may run code when it is loaded.
    """
    saved_by = len(list(checkpoint.glob("random_states_*.pkl")))
    if saved_by != accelerator.num_processes:
        logger.info(
            "The checkpoint %s is of %d processes, not %d: what is drawn in training, such as dropout, is not as it "
            "would have been.",
            *(checkpoint, saved_by, accelerator.num_processes),
        )
    try:
        if saved_by == accelerator.num_processes:
            # Accelerate passes over what it can't read.
            load(checkpoint / f"random_states_{accelerator.process_index}.pkl", weights_only=True)
        accelerator.load_state(str(checkpoint), load_kwargs={"weights_only": True})
    except UnpicklingError:
        raise ValueError(f"the checkpoint {checkpoint} may run code when it is loaded, and is not") from None
    except (RuntimeError, SafetensorError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the checkpoint {checkpoint} does not fit the model: {reason}") from None
    return _read_progress(checkpoint)


def _read_progress(checkpoint: Path) -> Progress:
    label = f"the checkpoint {checkpoint}"
    values = read_json(checkpoint, _STATE_FILE, label)
    try:
        progress = make_settings(Progress, values)
    except ValueError as error:
        raise ValueError(f"{label} has a {_STATE_FILE} that does not fit: {error}") from None
    for name, value in asdict(progress).items():
        if value is not None and not value >= 0 and name != "best_loss":
            raise ValueError(f"{label} has a {_STATE_FILE} with a negative `{name}` ({value})")
    return progress
