"""The results of a fine-tuning run: its metrics, the predictions, and the confusion matrix of classes."""

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

from .task import FinetuneTask, elide

logger = logging.getLogger("regard.training")

PREDICTIONS, CONFUSION = "predictions.jsonl", "confusion_matrix"


def figures_of(logs: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics in the logs of an evaluation, without their prefix and without timings."""
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
    """Returns the results of a run, as they are written to results.json.

    Args:
        task: the task, which has recorded facts about the data.
        settings: the settings of the run.
        model: the best model.
        trainer: the trainer, after the training.
        metrics: the metrics of the best model, as `Trainer` logs them.
        seconds: the duration of the training.
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
        "data": task.facts,
        "settings": settings,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "evaluate")},
    }


def best_of(trainer: Trainer, patience: int) -> str:
    """Returns a message that says which epoch's model is kept, and whether the training stopped early.

    Args:
        trainer: the trainer, after the training.
        patience: the number of epochs without an improvement after which the training stops.
    """
    state, metric = trainer.state, str(trainer.args.metric_for_best_model)
    stopped = ""
    if state.global_step < state.max_steps:
        stopped = f"Training stopped after epoch {state.epoch:g}: the last {patience} were no better (`patience`). "
    for entry in state.log_history:
        if entry["step"] == state.best_global_step and (best := figures_of(entry)):
            shown = f"{metric.replace('_', ' ')} {best[metric]:.4g}"
            return f"{stopped}The best model is that of epoch {entry['epoch']:g}: {shown}."
    return f"{stopped}In no epoch was {metric} a number: the model of the last one is kept."


def _history(log: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Returns the metrics of each evaluation with its step."""
    return ({"step": entry["step"], **figures} for entry in log if (figures := figures_of(entry)))


def save_predictions(folder: Path, task: FinetuneTask, logits: Any) -> None:
    """Writes the held-out rows with the model's predictions, and the confusion matrix if the task has classes.

    Args:
        folder: folder of the run.
        task: the task, which holds the rows.
        logits: the outputs of the model for them.
    """
    predictions = task.predictions(logits)
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as file:
        for example, prediction in zip(task.held_out, predictions, strict=True):
            # A column of the data keeps its name; the prediction's gets a prefix.
            added = {"source": example["where"], **prediction}
            renamed = {f"model_{name}" if name in example["row"] else name: value for name, value in added.items()}
            file.write(json.dumps({**example["row"], **renamed}, ensure_ascii=False, default=str) + "\n")
    confusion = task.confusion(logits)
    if confusion is not None:
        _save_confusion(folder, *confusion)


def _save_confusion(folder: Path, names: list[str], table: np.ndarray) -> None:
    with (folder / f"{CONFUSION}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *names])
        writer.writerows([name, *row] for name, row in zip(names, table.tolist(), strict=True))
    shown = [_plain(name) for name in names]
    # Room for all cells and for the longest name.
    size = min(2.5 + len(names) * 0.4, 28) + max(map(len, shown)) * 0.1
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    # Coloured by the share of the row, so that rare classes are visible too.
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
    """Returns a name for matplotlib: shortened if it is long, and with dollar signs that do not start mathematics."""
    return elide(name).replace("$", r"\$")
