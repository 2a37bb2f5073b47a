"""Fine-tuning a model and describing the results: what `regard finetune` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..modeling.loading.load import MODEL
from ..training.finetuning.finetune import finetune as finetune_model
from .train import describe


def finetune(
    task: str, output: str | Path | None = None, settings: dict[str, Any] | None = None, *, resume: bool = False
) -> dict[str, Any]:
    """Fine-tunes a model for a task, writes its model card and logs the results.

    Args:
        task: name of the task, one of `training.finetuning.finetune.TASKS`.
        output: folder of the run; `runs/` and the task's name if None.
        settings: fields of `training.finetuning.settings.FinetuneSettings` by name.
        resume: continue the run in `output`, or start it if the folder has none.

    Returns:
        The results of the run, as `results.json` holds them.

    Raises:
        ValueError: if there is no such task, or its settings, data or folder can't be used.
        OSError: if a file can't be written.
    """
    folder = Path("runs", task) if output is None else Path(output)
    results = finetune_model(task, folder, settings, resume=resume)
    describe(results, folder / MODEL)
    return results
