"""Multiple choice: which of several texts continues, or answers, a first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorForMultipleChoice, EvalPrediction

from ..reading.tables import Column
from ..reading.typed_rows import LabelNames, Row
from .labels import is_empty, list_of, text_of
from .metrics import (
    Accuracy,
)
from .task import FinetuneTask, compute_metrics, scores_of, softmax


class MultipleChoice(FinetuneTask):
    """Predicts which of several texts continues, or answers, a first one."""

    name = "multiple-choice"
    auto_class = "AutoModelForMultipleChoice"
    best_by = "accuracy"
    measured = ("accuracy",)

    def columns(self) -> list[Column]:
        chosen = self.settings
        second = [Column(chosen.second_text_column, "second_text_column")] if chosen.second_text_column else []
        choices = [Column(name, "choices_column") for name in chosen.choices_column]
        return [
            Column(chosen.text_column, "text_column"),
            *second,
            *choices,
            Column(chosen.label_column, "label_column"),
        ]

    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        chosen = self.settings
        text = text_of(row, chosen.text_column, where)
        if len(chosen.choices_column) > 1:
            choices = [text_of(row, column, where) for column in chosen.choices_column]
        else:
            choices = list_of(row, chosen.choices_column[0], where)
        for choice in choices:
            if not isinstance(choice, str):
                raise ValueError(f"{where}: column {chosen.choices_column[0]!r} must hold texts, not {choice!r}")
        if len(choices) < 2:
            raise ValueError(f"{where}: there must be at least 2 choices in `choices_column`, not {len(choices)}")
        label = self._right(row[chosen.label_column], choices, where)
        if is_empty(text) or any(map(is_empty, choices)):
            return None
        if chosen.second_text_column:
            start = text_of(row, chosen.second_text_column, where)
            choices = [f"{start} {choice}".strip() for choice in choices]
        return {"text": text, "choices": choices, "label": label}

    def _right(self, value: Any, choices: list[str], where: str) -> int:
        if isinstance(value, str):
            value = value.strip()
            letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
            if value in choices:
                return choices.index(value)
            if value.isdecimal():
                value = int(value)
            elif len(value) == 1 and value.upper() in letters:
                return letters.index(value.upper())
        if not isinstance(value, int) or not 0 <= value < len(choices):
            raise ValueError(
                f"{where}: column {self.settings.label_column!r} must hold the number of the right choice, "
                f"from 0 to {len(choices) - 1}, its letter or its text, not {value!r}"
            )
        return value

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        number = len(examples[0]["choices"])
        for row in [*examples, *self.held_out]:
            if len(row["choices"]) != number:
                raise ValueError(
                    f"{row['where']}: {len(row['choices'])} choices in `choices_column`, but {number} in "
                    f"{examples[0]['where']}: all rows must have the same number"
                )

    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        truncated: list[bool] = []

        def batch(rows: Sequence[Row]) -> dict[str, Any]:
            number = len(rows[0]["choices"])
            texts = [row["text"] for row in rows for _ in row["choices"]]
            encoded, cut = self.tokenize(texts, [choice for row in rows for choice in row["choices"]])
            starts = range(0, len(texts), number)
            truncated.extend(any(cut[start : start + number]) for start in starts)
            grouped = {name: [values[start : start + number] for start in starts] for name, values in encoded.items()}
            return {**grouped, "labels": [row["label"] for row in rows]}

        encoded = self.in_batches(examples, batch)
        self.count_truncated(truncated, part)
        return encoded

    def collator(self) -> Any:
        return DataCollatorForMultipleChoice(self.tokenizer)

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        return compute_metrics(
            (Accuracy,), scores_of(outcome.predictions).argmax(axis=-1), np.asarray(outcome.label_ids)
        )

    def baselines(self) -> dict[str, float]:
        return {"accuracy_baseline": 1 / len(self.held_out[0]["choices"])}

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [
            {"prediction": int(row.argmax()), "choice": example["choices"][int(row.argmax())]}
            | {"probability": float(row.max())}
            for row, example in zip(softmax(scores_of(logits)), self.held_out, strict=True)
        ]
