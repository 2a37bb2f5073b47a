"""Fine-tuning a model and describing it: what `regard finetune` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..modeling.loading.load import MODEL
from ..training.finetuning.finetune import finetune as finetune_model
from .train import describe


def finetune(
    task: str, output: str | Path | None = None, settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Fine-tunes a model for a task, writes its model card and logs what came out.

    The result and the errors are those of `training.finetune.finetune`.

    Args:
        task: its name, one of `training.finetune.TASKS`.
        output: folder of the run; `runs/` and the task's name if None.
        settings: fields of `training.finetune.FinetuneSettings` by name.
        resume: go on with the run in `output`, or start it if there is none.
    """
    folder = Path("runs", task) if output is None else Path(output)
    results = finetune_model(task, folder, settings, resume=resume)
    describe(results, folder / MODEL)
    return results
