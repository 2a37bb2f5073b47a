"""What a fine-tuning run leaves behind: its figures, the predictions, and the confusion of classes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from transformers import PreTrainedModel, Trainer

from .finetune_base import FinetuneTask

PREDICTIONS, CONFUSION = "predictions.jsonl", "confusion_matrix"


def figures_of(logs: dict[str, Any]) -> dict[str, float]:
    """The figures of an evaluation, without its prefix, and without what depends on the clock."""
    clock = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    named = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    return {name: value for name, value in named.items() if name not in clock}


def make_results(
    task: FinetuneTask,
    settings: dict[str, Any],
    model: PreTrainedModel,
    trainer: Trainer,
    metrics: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    """What a run came to.

    Args:
        task: with what it has told of the data.
        settings: of the run.
        model: the best one.
        trainer: that trained it.
        metrics: of the best model.
        seconds: that the run took.
    """
    state = trainer.state
    return {
        "task": task.name,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "metrics": figures_of(metrics),
        "step": state.global_step,
        "best_step": state.best_global_step,
        "epoch": state.epoch,
        "history": list(_history(state.log_history)),
        "seconds": seconds,
        "device": trainer.args.device.type,
        "data": task.told,
        "settings": settings,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "evaluate")},
    }


def _history(log: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The figures of each evaluation, with its step."""
    return ({"step": entry["step"], **figures} for entry in log if (figures := figures_of(entry)))


def save_predictions(folder: Path, task: FinetuneTask, logits: Any) -> None:
    """Writes the held-out rows with what the model makes of each, and of classes the confusion.

    Args:
        folder: of the run.
        task: that knows the rows.
        logits: what the model gave for them.
    """
    found = task.predictions(logits)
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as file:
        for example, prediction in zip(task.held_out, found, strict=True):
            # A column of the same name keeps its own.
            own = {f"model_{name}" if name in example["row"] else name: value for name, value in prediction.items()}
            file.write(json.dumps({**example["row"], **own}, ensure_ascii=False, default=str) + "\n")
    confusion = task.confusion(logits)
    if confusion is not None:
        _save_confusion(folder, *confusion)


def _save_confusion(folder: Path, names: list[str], table: np.ndarray) -> None:
    with (folder / f"{CONFUSION}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *names])
        writer.writerows([name, *row] for name, row in zip(names, table.tolist(), strict=True))
    size = min(4 + len(names) * 0.4, 30)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    # By the share of its row, so that rare classes show too.
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="label", xticks=range(len(names)), yticks=range(len(names)))
    axes.set_xticklabels([_plain(name) for name in names], rotation=90)
    axes.set_yticklabels([_plain(name) for name in names])
    if len(names) <= 30:
        for (row, column), number in np.ndenumerate(table):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(number), ha="center", va="center", color=color)
    figure.savefig(folder / f"{CONFUSION}.png")


def _plain(name: str) -> str:
    """A name as matplotlib shows it: short, and with no dollar sign taken for mathematics."""
    return (name if len(name) <= 24 else f"{name[:23]}…").replace("$", r"\$")
