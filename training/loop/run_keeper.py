"""What the training loop keeps in the folder of a run: checkpoints, the history, and the best model."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from ..run.checkpoints import (
    Progress,
    checkpoint_of,
    is_whole,
    last_whole_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    tidy,
)
from ..run.files import write_text
from ..run.folder import json_safe, writing
from ..run.settings import TrainingSettings, to_dict
from .sharding import is_sharded

logger = logging.getLogger("regard.training")

CHECKPOINTS, HISTORY_FILE = "checkpoints", "history.jsonl"


class Keeper:
    """Saves and restores the state of a run, and records its figures. Every process has one and makes the same calls.

    Args:
        folder: folder of the run, which gets `checkpoints` and `history.jsonl`.
        settings: settings of the run.
        accelerator: has the model and its optimizer, and the trackers.

    Attributes:
        progress: how far the run has come.
        saved_step: the step of the last checkpoint that was saved or restored.
    """

    def __init__(self, folder: Path, settings: TrainingSettings, accelerator: Accelerator) -> None:
        self.checkpoints, self.history = folder / CHECKPOINTS, folder / HISTORY_FILE
        self.progress = Progress()
        self._settings, self._accelerator = settings, accelerator
        self.saved_step: int | None = None
        if not is_sharded(accelerator):
            accelerator.register_save_state_pre_hook(_drop_tied_weights)

    def start(self, resume: bool) -> None:
        """Restores the last checkpoint, if the run is resumed and there is one, and starts the trackers."""
        saved = last_whole_checkpoint(self.checkpoints) if resume else None
        if saved:
            self.progress = load_checkpoint(self._accelerator, saved)
            self.saved_step = self.progress.step
            logger.info("Going on from step %d.", self.progress.step)
        if self._accelerator.is_main_process:
            if saved:
                tidy(self.checkpoints, self.progress.step, self._settings.keep_last)
            self._truncate_history()
        config = {name: str(value) for name, value in to_dict(self._settings).items()}
        self._accelerator.init_trackers("regard", config)

    def save(self) -> None:
        """Saves a checkpoint of this step."""
        save_checkpoint(self._accelerator, self.checkpoints, self.progress, self._settings.keep_last)
        self.saved_step = self.progress.step

    def last_checkpoint(self) -> str:
        """A clause for errors that names the last checkpoint."""
        found = list_checkpoints(self.checkpoints)
        return f"the last checkpoint is {found[-1]}" if found else "there is no checkpoint"

    def record(self, kind: str, values: dict[str, float]) -> None:
        """Adds the figures of this step to the trackers and the history."""
        self._accelerator.log({f"{kind}/{name}": value for name, value in values.items()}, step=self.progress.step)
        self.write_history(kind, {"step": self.progress.step, **values})

    def write_history(self, kind: str, values: dict[str, float]) -> None:
        """Adds a line to the history alone; the values include the `step`."""
        if self._accelerator.is_main_process:
            record = json_safe({"step": values["step"], "kind": kind, **values})
            with writing(f"a line of {HISTORY_FILE}", self.history.parent), self.history.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _truncate_history(self) -> None:
        """Drops the lines of steps after the restored checkpoint, and incomplete lines."""
        kept = []
        text = self.history.read_text(encoding="utf-8", errors="replace") if self.history.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                if json.loads(line)["step"] <= self.progress.step:
                    kept.append(line)
        with writing(HISTORY_FILE, self.history.parent):
            write_text(self.history, "".join(line + "\n" for line in kept))

    def note_loss(self, loss: float) -> None:
        """Makes this step the best one if its held-out loss is the lowest so far, and the best one is to be kept."""
        best = self.progress.best_loss
        if not math.isfinite(loss):
            if self._accelerator.is_main_process:
                logger.warning("The held-out loss at step %d is not finite.", self.progress.step)
        elif self._settings.keep_best and (best is None or loss < best):
            self.progress.best_step, self.progress.best_loss = self.progress.step, loss

    def load_best(self) -> bool:
        """Loads the model of the best step, if it is kept and is not this one. Returns whether it did."""
        progress, best = self.progress, self.progress.best_step
        if not self._settings.keep_best or best is None or best == progress.step:
            return False
        checkpoint = checkpoint_of(self.checkpoints, best)
        if not (checkpoint.is_dir() and is_whole(checkpoint)):
            logger.warning("There is no whole checkpoint of step %d, the best: the model is the last one.", best)
            progress.best_step = progress.best_loss = None
            return False
        load_checkpoint(self._accelerator, checkpoint)
        logger.info("The best evaluation was that at step %d, and the model is the one of that step.", best)
        return True


def _drop_tied_weights(models: list[PreTrainedModel], weights: list[dict[str, Tensor]], folder: str) -> None:
    # Safetensors holds each tensor once. Accelerate drops tied weights too, but warns at each checkpoint.
    for model, state in zip(models, weights, strict=True):
        for name in model.all_tied_weights_keys:
            state.pop(name, None)
