"""The tasks of texts, words and choices; `answers` has question answering."""

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
from .labels import Row, declared_names, is_empty, label_name, list_of, require_known, text_of
from .metrics import (
    Accuracy,
    MacroF1,
    Matthews,
    MultiLabelF1,
    Pearson,
    Spearman,
    SquaredError,
)
from .task import FinetuneTask, first, measure, named_labels, softmax

logger = logging.getLogger("regard.training")

# Numbers of this size are far from what a new layer gives.
LARGE = 10.0


class _SequenceTask(FinetuneTask):
    """Texts, or pairs of them, that each have one label of a kind."""

    auto_class = "AutoModelForSequenceClassification"
    own_settings = ("text_column", "second_text_column", "label_column")
    problem_type: str

    def columns(self) -> list[Column]:
        chosen = self.settings
        second = [Column(chosen.second_text_column, "second_text_column")] if chosen.second_text_column else []
        return [Column(chosen.text_column, "text_column"), *second, Column(chosen.label_column, "label_column")]

    def parse(self, row: Row, where: str, features: Any) -> Row | None:
        texts = [text_of(row, column.name, where) for column in self.columns()[:-1]]
        label = self.parse_label(row[self.settings.label_column], where, features)
        return None if any(map(is_empty, texts)) else {"texts": texts, "label": label}

    @abstractmethod
    def parse_label(self, value: Any, where: str, features: Any) -> Any:
        """A row's label."""

    @abstractmethod
    def encode_label(self, label: Any) -> Any:
        """A label as the model takes it."""

    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        truncated: list[bool] = []
        bare = 0

        def batch(rows: Sequence[Row]) -> dict[str, Any]:
            nonlocal bare
            encoded, cut = self.tokenize(*zip(*(row["texts"] for row in rows), strict=True))
            truncated.extend(cut)
            bare += sum(all(each.special_tokens_mask) for each in encoded.encodings)
            return {**encoded, "labels": [self.encode_label(row["label"]) for row in rows]}

        encoded = self.in_batches(examples, batch)
        self.count_truncated(truncated, part)
        self.count("no_tokens", bare, len(examples), part, "have a text that the tokenizer sees nothing in")
        return encoded


class Classification(_SequenceTask):
    """One of several classes for a text or a pair of texts."""

    name = "classification"
    best_by = "accuracy"
    measured = ("accuracy", "f1", "matthews_correlation")
    problem_type = "single_label_classification"

    def stratum(self, example: Row) -> Hashable:
        return example["label"]

    def parse_label(self, value: Any, where: str, features: Any) -> str:
        column = self.settings.label_column
        return label_name(value, declared_names(features[column]), column, where)

    def learn_labels(self, examples: Sequence[Row], features: Any) -> None:
        column = self.settings.label_column
        used = [row["label"] for row in examples]
        if len(set(used)) == 1:
            raise ValueError(f"column {column!r} has one label only ({used[0]!r}): there is nothing to learn")
        self.names = self.learn_names(used, declared_names(features[column]))
        require_known((row["label"] for row in self.held_out), self.names, column)
        single = sum(count == 1 for count in self.told["labels"].values())
        if 2 * single > len(self.names):
            logger.warning(
                "%s of %s labels are those of one row only, too few to learn them by. Is `label_column` (%r) the "
                "right one? To predict numbers there is the task 'regression'.",
                *(f"{single:,}", f"{len(self.names):,}", column),
            )
        unmeasured = len(set(self.names) - {row["label"] for row in self.held_out})
        if unmeasured:
            logger.warning(
                "%s of %s labels are those of no held-out row, so nothing is measured of them.",
                *(f"{unmeasured:,}", f"{len(self.names):,}"),
            )
        self.ids = {name: number for number, name in enumerate(self.names)}

    def encode_label(self, label: Any) -> int:
        return self.ids[label]

    def config_fields(self) -> dict[str, Any]:
        return named_labels(self.names) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        return measure(
            (Accuracy, MacroF1, Matthews), first(outcome.predictions).argmax(axis=-1), np.asarray(outcome.label_ids)
        )

    def baselines(self) -> dict[str, float]:
        usual = max(self.names, key=self.told["labels"].__getitem__)
        return {"accuracy_baseline": float(np.mean([row["label"] == usual for row in self.held_out]))}

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [
            {"prediction": self.names[place], "probability": float(row[place])}
            for row in softmax(first(logits))
            for place in [int(row.argmax())]
        ]

    def confusion(self, logits: Any) -> tuple[list[str], np.ndarray]:
        table = np.zeros((len(self.names), len(self.names)), dtype=np.int64)
        for row, place in zip(self.held_out, first(logits).argmax(axis=-1).tolist(), strict=True):
            table[self.ids[row["label"]], place] += 1
        return self.names, table


class Regression(_SequenceTask):
    """A number for a text or a pair of texts."""

    name = "regression"
    best_by = "mse"
    measured = ("mse", "pearson", "spearman")
    problem_type = "regression"

    def parse_label(self, value: Any, where: str, features: Any) -> float:
        column = self.settings.label_column
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: column {column!r} must hold a number, not {repr(value)[:40]}")
        return number

    def learn_labels(self, examples: Sequence[Row], features: Any) -> None:
        column = self.settings.label_column
        numbers = [row["label"] for row in examples]
        mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
        if min(numbers) == max(numbers):
            raise ValueError(f"column {column!r} holds one number only ({numbers[0]:g}): there is nothing to learn")
        if abs(mean) > LARGE or deviation > LARGE:
            logger.warning(
                "The numbers in column %r have the mean %.4g and the standard deviation %.4g. A model begins near 0 "
                "and is slow to learn what is far from it: better scale them to a mean near 0 and a deviation near 1.",
                *(column, mean, deviation),
            )
        self.told["labels"] = {"mean": mean}

    def encode_label(self, label: Any) -> float:
        return float(label)

    def config_fields(self) -> dict[str, Any]:
        return named_labels([self.settings.label_column]) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        return measure(
            (SquaredError, Pearson, Spearman), first(outcome.predictions)[:, 0], np.asarray(outcome.label_ids)
        )

    def baselines(self) -> dict[str, float]:
        errors = np.array([row["label"] for row in self.held_out]) - self.told["labels"]["mean"]
        return {"mse_baseline": float(np.mean(errors**2))}

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [{"prediction": float(number)} for number in first(logits)[:, 0]]


class MultiLabel(_SequenceTask):
    """Any number of labels for a text or a pair of texts."""

    name = "multi-label"
    best_by = "f1"
    measured = ("f1", "f1_macro", "accuracy")
    problem_type = "multi_label_classification"

    def parse(self, row: Row, where: str, features: Any) -> Row | None:
        column = self.settings.label_column
        parsed = super().parse({**row, column: list_of(row, column, where)}, where, features)
        return parsed and {**parsed, "has_list": row[column] is not None}

    def parse_label(self, value: Any, where: str, features: Any) -> list[str]:
        column = self.settings.label_column
        names = declared_names(features[column])
        return [label_name(one, names, column, where) for one in value]

    def labels_of(self, example: Row) -> set[str]:
        return set(example["label"])

    def learn_labels(self, examples: Sequence[Row], features: Any) -> None:
        column = self.settings.label_column
        for part, rows in (("data", examples), ("validation", self.held_out)):
            missing = sum(not row["has_list"] for row in rows)
            self.count("no_labels", missing, len(rows), part, "have no list of labels, which counts as an empty one")
        used = [label for row in examples for label in set(row["label"])]
        if not used:
            raise ValueError(f"column {column!r} has no labels: all its lists are empty")
        lengths = {len(row["label"]) for row in examples}
        if len(lengths) == 1 and set(used) <= {"0", "1", "False", "True"} and len(used) < sum(lengths) * len(examples):
            raise ValueError(
                f"column {column!r} must hold the labels that apply, by name or number, but it seems to hold "
                f"0 or 1 for each of {lengths.pop()} labels"
            )
        self.names = self.learn_names(used, declared_names(features[column]))
        require_known((label for row in self.held_out for label in row["label"]), self.names, column)

    def encode_label(self, label: Any) -> list[float]:
        return [float(name in label) for name in self.names]

    def config_fields(self) -> dict[str, Any]:
        return named_labels(self.names) | {"problem_type": self.problem_type}

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        chosen = (first(outcome.predictions) > 0).astype(int)
        return measure((MultiLabelF1,), chosen, np.asarray(outcome.label_ids).astype(int))

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        shares = 1 / (1 + np.exp(-np.asarray(first(logits), dtype=np.float64)))
        return [
            {
                "prediction": [name for name, share in zip(self.names, row, strict=True) if share > 0.5],
                "probabilities": {name: float(share) for name, share in zip(self.names, row, strict=True)},
            }
            for row in shares
        ]
