"""Tasks with one target for a text or a pair of texts: classification, regression, multi-label classification."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from ..reading.tables import Column
from ..reading.typed_rows import LabelNames, Row
from .labels import is_empty, label_name, list_of, require_known, text_of
from .metrics import (
    Accuracy,
    MacroF1,
    Matthews,
    MultiLabelF1,
    Pearson,
    Spearman,
    SquaredError,
)
from .task import FinetuneTask, compute_metrics, named_labels, scores_of, softmax

logger = logging.getLogger("regard.training")

# Labels of this size are far from the first outputs of a new layer.
LARGE = 10.0


class _SequenceTask(FinetuneTask):
    """A task whose model predicts one target for a text or a pair of texts."""

    auto_class = "AutoModelForSequenceClassification"
    problem_type: str

    def columns(self) -> list[Column]:
        chosen = self.settings
        second = [Column(chosen.second_text_column, "second_text_column")] if chosen.second_text_column else []
        return [Column(chosen.text_column, "text_column"), *second, Column(chosen.label_column, "label_column")]

    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        texts = [text_of(row, column.name, where) for column in self.columns()[:-1]]
        label = self.parse_label(row[self.settings.label_column], where, label_names)
        return None if any(map(is_empty, texts)) else {"texts": texts, "label": label}

    @abstractmethod
    def parse_label(self, value: Any, where: str, label_names: LabelNames) -> Any:
        """Returns the label of a row."""

    @abstractmethod
    def encode_label(self, label: Any) -> Any:
        """Returns a label in the form that the model takes."""

    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        truncated: list[bool] = []
        without_tokens = 0

        def batch(rows: Sequence[Row]) -> dict[str, Any]:
            nonlocal without_tokens
            encoded, cut = self.tokenize(*zip(*(row["texts"] for row in rows), strict=True))
            truncated.extend(cut)
            without_tokens += sum(all(each.special_tokens_mask) for each in encoded.encodings)
            return {**encoded, "labels": [self.encode_label(row["label"]) for row in rows]}

        encoded = self.in_batches(examples, batch)
        self.count_truncated(truncated, part)
        problem = "have a text that the tokenizer finds no token in"
        self.warn_and_count("no_tokens", without_tokens, len(examples), part, problem)
        return encoded


class Classification(_SequenceTask):
    """Predicts one of several classes for a text or a pair of texts."""

    name = "classification"
    best_by = "accuracy"
    measured = ("accuracy", "f1", "matthews_correlation")
    problem_type = "single_label_classification"

    def stratum(self, example: Row) -> Hashable:
        return example["label"]

    def parse_label(self, value: Any, where: str, label_names: LabelNames) -> str:
        column = self.settings.label_column
        return label_name(value, label_names.get(column), column, where)

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        column = self.settings.label_column
        used = [row["label"] for row in examples]
        if len(set(used)) == 1:
            raise ValueError(f"column {column!r} has one label only ({used[0]!r}): there is nothing to learn")
        self.names = self.learn_names(used, label_names.get(column))
        require_known((row["label"] for row in self.held_out), self.names, column)
        single = sum(count == 1 for count in self.facts["labels"].values())
        if 2 * single > len(self.names):
            logger.warning(
                "%s of %s labels have a single row, too few to learn them from. Is `label_column` (%r) the right "
                "column? To predict numbers, choose the task 'regression'.",
                *(f"{single:,}", f"{len(self.names):,}", column),
            )
        unmeasured = len(set(self.names) - {row["label"] for row in self.held_out})
        if unmeasured:
            logger.warning(
                "%s of %s labels have no held-out row, so the metrics do not cover them.",
                *(f"{unmeasured:,}", f"{len(self.names):,}"),
            )
        self.ids = {name: number for number, name in enumerate(self.names)}

    def encode_label(self, label: Any) -> int:
        return self.ids[label]

    def config_fields(self) -> dict[str, Any]:
        return named_labels(self.names) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        return compute_metrics(
            (Accuracy, MacroF1, Matthews),
            scores_of(outcome.predictions).argmax(axis=-1),
            np.asarray(outcome.label_ids),
        )

    def baselines(self) -> dict[str, float]:
        most_frequent = max(self.names, key=self.facts["labels"].__getitem__)
        return {"accuracy_baseline": float(np.mean([row["label"] == most_frequent for row in self.held_out]))}

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [
            {"prediction": self.names[place], "probability": float(row[place])}
            for row in softmax(scores_of(logits))
            for place in [int(row.argmax())]
        ]

    def confusion(self, logits: Any) -> tuple[list[str], np.ndarray]:
        table = np.zeros((len(self.names), len(self.names)), dtype=np.int64)
        for row, place in zip(self.held_out, scores_of(logits).argmax(axis=-1).tolist(), strict=True):
            table[self.ids[row["label"]], place] += 1
        return self.names, table


class Regression(_SequenceTask):
    """Predicts a number for a text or a pair of texts."""

    name = "regression"
    best_by = "mse"
    measured = ("mse", "pearson", "spearman")
    problem_type = "regression"

    def parse_label(self, value: Any, where: str, label_names: LabelNames) -> float:
        column = self.settings.label_column
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: column {column!r} must hold a number, not {repr(value)[:40]}")
        return number

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        column = self.settings.label_column
        numbers = [row["label"] for row in examples]
        mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
        if min(numbers) == max(numbers):
            raise ValueError(f"column {column!r} holds one number only ({numbers[0]:g}): there is nothing to learn")
        if abs(mean) > LARGE or deviation > LARGE:
            logger.warning(
                "The numbers in column %r have the mean %.4g and the standard deviation %.4g. The outputs of a new "
                "layer are near 0, and distant numbers are learnt slowly: scale them to a mean near 0 and a standard "
                "deviation near 1.",
                *(column, mean, deviation),
            )
        self.facts["labels"] = {"mean": mean}

    def encode_label(self, label: Any) -> float:
        return float(label)

    def config_fields(self) -> dict[str, Any]:
        return named_labels([self.settings.label_column]) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        return compute_metrics(
            (SquaredError, Pearson, Spearman), scores_of(outcome.predictions)[:, 0], np.asarray(outcome.label_ids)
        )

    def baselines(self) -> dict[str, float]:
        errors = np.array([row["label"] for row in self.held_out]) - self.facts["labels"]["mean"]
        return {"mse_baseline": float(np.mean(errors**2))}

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [{"prediction": float(number)} for number in scores_of(logits)[:, 0]]


class MultiLabel(_SequenceTask):
    """Predicts any number of labels for a text or a pair of texts."""

    name = "multi-label"
    best_by = "f1"
    measured = ("f1", "f1_macro", "accuracy")
    problem_type = "multi_label_classification"

    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        column = self.settings.label_column
        parsed = super().parse({**row, column: list_of(row, column, where)}, where, label_names)
        return parsed and {**parsed, "has_list": row[column] is not None}

    def parse_label(self, value: Any, where: str, label_names: LabelNames) -> list[str]:
        column = self.settings.label_column
        names = label_names.get(column)
        return [label_name(one, names, column, where) for one in value]

    def labels_of(self, example: Row) -> set[str]:
        return set(example["label"])

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        column = self.settings.label_column
        for part, rows in (("data", examples), ("validation", self.held_out)):
            missing = sum(not row["has_list"] for row in rows)
            self.warn_and_count(
                "no_labels", missing, len(rows), part, "have no list of labels, which counts as an empty one"
            )
        used = [label for row in examples for label in set(row["label"])]
        if not used:
            raise ValueError(f"column {column!r} has no labels: all its lists are empty")
        lengths = {len(row["label"]) for row in examples}
        if len(lengths) == 1 and set(used) <= {"0", "1", "False", "True"} and len(used) < sum(lengths) * len(examples):
            raise ValueError(
                f"column {column!r} must hold the labels that apply, by name or number, but it seems to hold "
                f"0 or 1 for each of {lengths.pop()} labels"
            )
        self.names = self.learn_names(used, label_names.get(column))
        require_known((label for row in self.held_out for label in row["label"]), self.names, column)

    def encode_label(self, label: Any) -> list[float]:
        return [float(name in label) for name in self.names]

    def config_fields(self) -> dict[str, Any]:
        return named_labels(self.names) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        chosen = (scores_of(outcome.predictions) > 0).astype(int)
        return compute_metrics((MultiLabelF1,), chosen, np.asarray(outcome.label_ids).astype(int))

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        shares = 1 / (1 + np.exp(-np.asarray(scores_of(logits), dtype=np.float64)))
        return [
            {
                "prediction": [name for name, share in zip(self.names, row, strict=True) if share > 0.5],
                "probabilities": {name: float(share) for name, share in zip(self.names, row, strict=True)},
            }
            for row in shares
        ]
