"""Run checkpoints: the complete state of a run.

A checkpoint is written under a temporary name and then renamed, so that an incomplete one is never taken for whole.
"""

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
    """The progress of a run.

    Attributes:
        step: number of optimizer steps done.
        epoch: number of the current epoch.
        step_in_epoch: number of steps done in the current epoch.
        seconds: time spent in training.
        tokens: number of tokens seen, without padding.
        skipped_steps: number of steps that changed no weights because their loss or gradient was not finite.
        best_step: step of the evaluation with the lowest loss; None unless the run keeps the best checkpoint.
        best_loss: loss of that evaluation.
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
    """The step of the newest checkpoint in a folder; 0 without a checkpoint."""
    found = list_checkpoints(folder)
    return _number(found[-1]) if found else 0


def checkpoint_of(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint, whether or not it exists."""
    return folder / f"{_PREFIX}{step}"


def _checksums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint, by the file's path within it."""
    sums = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != _CHECKSUM_FILE:
            with path.open("rb") as file:
                sums[path.relative_to(checkpoint).as_posix()] = sha_fileobj(file).hex()
    return sums


def is_whole(checkpoint: Path) -> bool:
    """Returns whether all files of a checkpoint are as they were saved. Logs the names of damaged ones."""
    try:
        expected = read_json(checkpoint, _CHECKSUM_FILE, str(checkpoint))
    except (OSError, ValueError):
        expected = {_CHECKSUM_FILE: ""}
    found = _checksums(checkpoint)
    damaged = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if damaged:
        logger.warning("The checkpoint %s is damaged (%s) and is skipped.", checkpoint, ", ".join(damaged))
    return not damaged


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, or None. Logs the incomplete and damaged checkpoints that it skips."""
    for partial in folder.glob(f"{PARTIAL}*"):
        logger.warning("The checkpoint %s was not saved completely and is skipped.", partial)
    return next((checkpoint for checkpoint in reversed(list_checkpoints(folder)) if is_whole(checkpoint)), None)


def save_checkpoint(accelerator: Accelerator, folder: Path, progress: Progress, keep_last: int) -> None:
    """Saves weights, optimizer, random state and progress, then deletes the checkpoints that need not be kept.

    The last `keep_last` checkpoints are kept, and for each of them the checkpoint of the best evaluation until then.
    Every process must call this function.

    Args:
        accelerator: accelerator that the model and the optimizer are prepared with.
        folder: folder of the checkpoints.
        progress: progress of the run.
        keep_last: number of checkpoints to keep.

    Raises:
        OSError: in every process, if one of them could not write its part. Earlier checkpoints stay unchanged.
    """
    partial = folder / f"{PARTIAL}{progress.step}"
    main = accelerator.is_main_process
    failure = attempt(lambda: _make_room(folder, partial)) if main else None
    # The processes exchange failures before each part, so that none waits for a process that has failed.
    if _all_did(accelerator, failure):
        failure = attempt(lambda: accelerator.save_state(str(partial)))
    if _all_did(accelerator, failure) and main:
        failure = attempt(lambda: _finish(partial, checkpoint_of(folder, progress.step), progress))
    if not _all_did(accelerator, failure):
        earlier = list_checkpoints(folder)
        remaining = f"; that of step {_number(earlier[-1])} is kept" if earlier else "; there is no earlier one"
        error = not_written(f"the checkpoint of step {progress.step}", folder, failure, remaining)
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise error from failure
    if main:
        for checkpoint in list_checkpoints(folder):
            # A later checkpoint is damaged: otherwise the run would have continued from it.
            if _number(checkpoint) > progress.step:
                _delete(checkpoint)
        tidy(folder, progress.step, keep_last)


def tidy(folder: Path, step: int, keep_last: int) -> None:
    """Deletes the leftovers of interrupted writes and deletions, and the checkpoints that need not be kept.

    Args:
        folder: folder of the checkpoints.
        step: step of the last checkpoint to consider; later ones stay.
        keep_last: number of checkpoints to keep, in addition to those of the best evaluations that they record.
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
    """Returns whether no process has failed; waits until every process has called this function."""
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
        # The progress file is damaged, so that the best step is unknown.
        return None


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> Progress:
    """Restores the state that `save_checkpoint` saved, and returns the progress of the run.

    The number of processes may differ from that of the run that saved the checkpoint. Random numbers in training, such
    as those of dropout, then differ from those of an uninterrupted run.

    Raises:
        ValueError: if the checkpoint does not fit the model, or has a file that may run code when it is loaded.
    """
    saved_by = len(list(checkpoint.glob("random_states_*.pkl")))
    if saved_by != accelerator.num_processes:
        logger.info(
            "The checkpoint %s was saved by %d processes, not %d: random numbers in training, such as those of "
            "dropout, differ from those of an uninterrupted run.",
            *(checkpoint, saved_by, accelerator.num_processes),
        )
    try:
        if saved_by == accelerator.num_processes:
            # Accelerate ignores random states that it can't read; here they raise an error.
            load(checkpoint / f"random_states_{accelerator.process_index}.pkl", weights_only=True)
        accelerator.load_state(str(checkpoint), load_kwargs={"weights_only": True})
    except UnpicklingError:
        raise ValueError(f"the checkpoint {checkpoint} may run code when it is loaded, so it was not loaded") from None
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
        raise ValueError(f"{label} has a {_STATE_FILE} that is invalid: {error}") from None
    for name, value in asdict(progress).items():
        if value is not None and not value >= 0 and name != "best_loss":
            raise ValueError(f"{label} has a {_STATE_FILE} with a negative `{name}` ({value})")
    return progress
