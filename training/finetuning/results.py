"""What a fine-tuning run leaves behind: its figures, the predictions, and the confusion of classes."""

from __future__ import annotations

import csv
import json
import logging
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from transformers import PreTrainedModel, Trainer

from .task import FinetuneTask, shorten

logger = logging.getLogger("regard.training")

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
        "metrics": {**figures_of(metrics), **task.baselines()},
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


def best_of(trainer: Trainer, patience: int) -> str:
    """Which model a training has kept, and whether it has stopped early, for people.

    Args:
        trainer: that has trained.
        patience: epochs that may be no better than the best.
    """
    state, metric = trainer.state, str(trainer.args.metric_for_best_model)
    stopped = ""
    if state.global_step < state.max_steps:
        stopped = (
            f"Training has stopped after epoch {state.epoch:g}: the last {patience} were no better (`patience`). "
        )
    for entry in state.log_history:
        if entry["step"] == state.best_global_step and (best := figures_of(entry)):
            shown = f"{metric.replace('_', ' ')} {best[metric]:.4g}"
            return f"{stopped}The best model is that of epoch {entry['epoch']:g}: {shown}."
    return f"{stopped}No epoch had a {metric} that is a number: the model is the last one."


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
    predictions = task.predictions(logits)
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as file:
        for example, prediction in zip(task.held_out, predictions, strict=True):
            # A column of the same name keeps its own.
            found = {"source": example["where"], **prediction}
            own = {f"model_{name}" if name in example["row"] else name: value for name, value in found.items()}
            file.write(json.dumps({**example["row"], **own}, ensure_ascii=False, default=str) + "\n")
    confusion = task.confusion(logits)
    if confusion is not None:
        _save_confusion(folder, *confusion)


def _save_confusion(folder: Path, names: list[str], table: np.ndarray) -> None:
    with (folder / f"{CONFUSION}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *names])
        writer.writerows([name, *row] for name, row in zip(names, table.tolist(), strict=True))
    shown = [_plain(name) for name in names]
    # Room for all cells, and beside them for the longest name.
    size = min(2.5 + len(names) * 0.4, 28) + max(map(len, shown)) * 0.1
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    # By the share of its row, so that rare classes show too.
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="label", xticks=range(len(names)), yticks=range(len(names)))
    axes.set_xticklabels(shown, rotation=90)
    axes.set_yticklabels(shown)
    if len(names) <= 30:
        for (row, column), number in np.ndenumerate(table):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(number), ha="center", va="center", color=color)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(folder / f"{CONFUSION}.png")
    if any("Glyph" in str(warning.message) for warning in caught):
        logger.warning(
            "%s.png shows boxes where matplotlib's font lacks characters of the labels; %s.csv has them.",
            *(CONFUSION, CONFUSION),
        )


def _plain(name: str) -> str:
    """A name as matplotlib shows it: not long, and with no dollar sign taken for mathematics."""
    return shorten(name).replace("$", r"\$")
