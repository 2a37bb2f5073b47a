"""Token classification: a label for each word of a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, EvalPrediction

from ..reading.tables import Column
from ..reading.typed_rows import LabelNames, Row
from .labels import label_name, list_of, require_known
from .metrics import (
    Spans,
    TagAccuracy,
    marks_spans,
)
from .task import FinetuneTask, compute_metrics, named_labels, scores_of

logger = logging.getLogger("regard.training")


class TokenClassification(FinetuneTask):
    """Predicts a tag for each word of a text, from the output at the word's first token."""

    name = "tokens"
    auto_class = "AutoModelForTokenClassification"
    best_by = "f1"
    measured: Sequence[str] = ("f1", "precision", "recall", "accuracy")

    def columns(self) -> list[Column]:
        chosen = self.settings
        return [Column(chosen.tokens_column, "tokens_column"), Column(chosen.tags_column, "tags_column")]

    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        words_column, column = self.settings.tokens_column, self.settings.tags_column
        words = list_of(row, words_column, where, separator=None)
        names = label_names.get(column)
        tags = [label_name(tag, names, column, where) for tag in list_of(row, column, where, separator=None)]
        if len(words) != len(tags):
            raise ValueError(
                f"{where}: {len(words)} words in column {words_column!r}, but {len(tags)} tags in column {column!r}"
            )
        for word in words:
            if not isinstance(word, str):
                raise ValueError(f"{where}: column {words_column!r} must hold words, not {repr(word)[:40]}")
        return {"words": words, "label": tags} if any(word.strip() for word in words) else None

    def labels_of(self, example: Row) -> set[str]:
        return set(example["label"])

    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        column = self.settings.tags_column
        used = [tag for row in examples for tag in row["label"]]
        if len(set(used)) == 1:
            raise ValueError(f"column {column!r} has one tag only ({used[0]!r}): there is nothing to learn")
        self.names = self.learn_names(used, label_names.get(column))
        require_known((tag for row in self.held_out for tag in row["label"]), self.names, column)
        self.ids = {name: number for number, name in enumerate(self.names)}
        self.spans = marks_spans(self.names)
        others = [name for name in self.names if name != "O" and not marks_spans([name])]
        if others and len(others) + ("O" in self.names) < len(self.names):
            shown = ", ".join(map(repr, others[:5]))
            logger.warning("Spans are not measured, as some tags do not begin with B-, I-, E- or S-: %s.", shown)
        if not self.spans:
            self.best_by, self.measured = "accuracy", ("accuracy",)

    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        truncated: list[bool] = []
        lost = 0

        def batch(rows: Sequence[Row]) -> dict[str, Any]:
            nonlocal lost
            encoded, cut = self.tokenize([row["words"] for row in rows], is_split_into_words=True)
            truncated.extend(cut)
            labels = []
            for number, row in enumerate(rows):
                places: dict[int, int] = {}
                for place, word in enumerate(encoded.word_ids(number)):
                    if word is not None:
                        places.setdefault(word, place)
                # A word that was cut off, or in which the tokenizer finds no token, has no place.
                row["places"] = [places.get(word) for word in range(len(row["words"]))]
                lost += not cut[number] and None in row["places"]
                marked = [-100] * len(encoded["input_ids"][number])
                for place, tag in zip(row["places"], row["label"], strict=True):
                    if place is not None:
                        marked[place] = self.ids[tag]
                labels.append(marked)
            return {**encoded, "labels": labels}

        encoded = self.in_batches(examples, batch)
        self.count_truncated(truncated, part)
        self.warn_and_count(
            "not_aligned", lost, len(examples), part, "hold a word without a token, whose tag is not used"
        )
        return encoded

    def config_fields(self) -> dict[str, Any]:
        return named_labels(self.names)

    def collator(self) -> Any:
        return DataCollatorForTokenClassification(self.tokenizer)

    def _tags(self, logits: Any) -> list[list[str | None]]:
        chosen = scores_of(logits).argmax(axis=-1)
        return [
            [None if place is None else self.names[chosen[number, place]] for place in row["places"]]
            for number, row in enumerate(self.held_out)
        ]

    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        # A word without a token counts as tagged "O", outside of any span.
        found = [[tag or "O" for tag in row] for row in self._tags(outcome.predictions)]
        kinds = (Spans, TagAccuracy) if self.spans else (TagAccuracy,)
        return compute_metrics(kinds, found, [row["label"] for row in self.held_out])

    def baselines(self) -> dict[str, float]:
        most_frequent = max(self.names, key=self.facts["labels"].__getitem__)
        return {
            "accuracy_baseline": float(
                np.mean([tag == most_frequent for row in self.held_out for tag in row["label"]])
            )
        }

    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        return [{"prediction": tags} for tags in self._tags(logits)]
