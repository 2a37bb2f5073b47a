"""The base of the tasks that a model can be fine-tuned for: reading rows, encoding them, and measuring the model.

Each task is a subclass, and an instance serves one run: `prepare` parses and encodes the rows, and the other methods
give `Trainer` and the results what depends on the task.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerFast

from ..reading.splits import sample_rows
from ..reading.tables import Column
from ..reading.typed_rows import LabelNames, Row, Table
from ..run.settings import held_out_share
from .labels import sort_names, warn_of_imbalance
from .settings import TASK_SETTINGS, FinetuneSettings, belongs_to_some_tasks

logger = logging.getLogger("regard.training")

# Rows that are encoded together.
BATCH_SIZE = 1000

# The most labels that are logged with the number of their rows.
LABELS_SHOWN = 10

# Metrics of which the lowest value is the best.
ERRORS = ("loss", "mse")


class FinetuneTask(ABC):
    """A task to fine-tune for, such as classification: its columns, labels, encoding, metrics and predictions.

    Attributes:
        name: the name on the command line.
        auto_class: name of transformers' Auto class that loads models for the task.
        best_by: the metric that chooses the best model unless the settings name another.
        measured: the metrics that the setting `metric` may name, besides the loss.
        label_inputs: the arguments of the model's forward that take the labels.
        held_out: the parsed held-out rows.
        facts: what is recorded of the data in results.json.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    best_by: str
    measured: Sequence[str]
    label_inputs: ClassVar[Sequence[str]] = ("labels",)

    def __init__(self, settings: FinetuneSettings) -> None:
        self.settings = settings
        self._check_settings()
        self.tokenizer: PreTrainedTokenizerFast
        self.max_length = 0
        self.held_out: list[Row] = []
        self.facts: dict[str, Any] = {}

    @property
    def own_settings(self) -> tuple[str, ...]:
        """The settings that this task has and some other task lacks."""
        return TASK_SETTINGS[self.name]

    def _check_settings(self) -> None:
        columns = self.columns()
        defaults = type(self.settings)()
        for name, value in vars(self.settings).items():
            if belongs_to_some_tasks(name) and name not in self.own_settings and value != getattr(defaults, name):
                allowed = ", ".join(sorted(self.own_settings))
                raise ValueError(f"`{name}` ({value!r}) is no setting of the task {self.name!r}, which has {allowed}")
        arguments: dict[str, str | None] = {}
        for column in columns:
            if column.name in arguments:
                other = arguments[column.name]
                raise ValueError(f"`{other}` and `{column.argument}` must name two columns, not both {column.name!r}")
            arguments[column.name] = column.argument

    # Reading

    @abstractmethod
    def columns(self) -> list[Column]:
        """Returns the columns that the task reads."""

    @abstractmethod
    def parse(self, row: Row, where: str, label_names: LabelNames) -> Row | None:
        """Returns the texts and labels of a row in the form that the task encodes; None if a text is empty.

        Args:
            row: the values of the row, by column.
            where: its place, for errors.
            label_names: the names that the data declares for numbers, by column.

        Raises:
            ValueError: if a value is not what the task needs.
        """

    def stratum(self, example: Row) -> Hashable:
        """Returns the group of a parsed row; the same share of each group is held out."""
        return None

    def labels_of(self, example: Row) -> set[str]:
        """Returns the labels of a parsed row that must not occur in held-out rows alone."""
        return set()

    def read(self, table: Table, part: str) -> list[Row]:
        """Parses the rows of a table. Rows with an empty text are left out, with a warning.

        Args:
            table: the rows.
            part: "data" or "validation", for the warning.

        Raises:
            ValueError: if a row has a value that the task does not take, or no row is left.
        """
        parsed = []
        for row, where in zip(table.rows, table.places, strict=True):
            example = self.parse(row, where, table.label_names)
            if example is not None:
                # The row as it was read is written with its prediction.
                parsed.append({**example, "row": row, "where": where})
        total = len(table.rows)
        self.warn_and_count("empty", total - len(parsed), total, part, "have an empty text and are left out")
        if not parsed:
            raise ValueError(f"no row of {part} is left to use")
        return parsed

    def warn_and_count(self, key: str, number: int, total: int, part: str, problem: str) -> None:
        """Warns of rows with a problem, if there are any, and records their number for the results.

        Args:
            key: name of the problem in the results.
            number: the number of rows with the problem.
            total: the number of rows in the part.
            part: "data" or "validation".
            problem: the problem as the predicate of a sentence about the rows, for the warning.
        """
        if number:
            logger.warning("%s of %s rows of %s %s.", f"{number:,}", f"{total:,}", part, problem)
            self.facts.setdefault("warnings", {}).setdefault(part, {})[key] = number

    # Encoding

    def prepare(
        self, tokenizer: PreTrainedTokenizerFast, max_length: int, table: Table, held_out: Table | None
    ) -> tuple[Dataset, Dataset]:
        """Parses and encodes the training rows and the held-out rows.

        Args:
            tokenizer: the tokenizer of the model.
            max_length: the longest input, in tokens.
            table: the rows of `data`.
            held_out: the held-out rows; None holds out the share of `table` that `validation` gives.

        Returns:
            The encoded training rows and held-out rows.

        Raises:
            ValueError: if a row has a value that the task does not take, there are too few rows or labels, or the
                held-out rows have labels that the training rows lack.
        """
        self.tokenizer, self.max_length = tokenizer, max_length
        examples = self.read(table, "data")
        if held_out is None:
            examples, self.held_out = self._hold_out(examples)
        else:
            self.held_out = self.read(held_out, "validation")
        logger.info("%s rows to train on, %s held out.", f"{len(examples):,}", f"{len(self.held_out):,}")
        self.learn_labels(examples, table.label_names)
        self.facts |= {"rows": len(examples), "held_out_rows": len(self.held_out)}
        return self.encode(examples, "data"), self.encode(self.held_out, "validation")

    def _hold_out(self, examples: list[Row]) -> tuple[list[Row], list[Row]]:
        share = held_out_share(self.settings.validation)
        assert share is not None
        drawn = set(sample_rows([self.stratum(example) for example in examples], share, self.settings.seed))
        kept = [example for place, example in enumerate(examples) if place not in drawn]
        known = {label for example in kept for label in self.labels_of(example)}
        for place in sorted(drawn):
            labels = self.labels_of(examples[place])
            if not labels <= known:
                # The row is trained on instead: otherwise nothing could be learnt of one of its labels.
                drawn.remove(place)
                known |= labels
        if not drawn:
            raise ValueError(
                f"`data` has {len(examples)} usable rows: none can be held out (`validation` is {share:g}) "
                "all of whose labels are learnt from the others"
            )
        kept = [example for place, example in enumerate(examples) if place not in drawn]
        return kept, [examples[place] for place in sorted(drawn)]

    @abstractmethod
    def learn_labels(self, examples: Sequence[Row], label_names: LabelNames) -> None:
        """Finds the labels of the parsed training rows.

        Raises:
            ValueError: if there are too few labels, or the held-out rows have others.
        """

    @abstractmethod
    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        """Returns the model's inputs and labels for parsed rows; `part` is "data" or "validation"."""

    def in_batches(self, examples: Sequence[Row], encode: Callable[[Sequence[Row]], dict[str, Any]]) -> Dataset:
        """Encodes rows in batches, which takes less memory than all at once."""
        starts = range(0, len(examples), BATCH_SIZE)
        return concatenate_datasets(
            [Dataset.from_dict(encode(examples[start : start + BATCH_SIZE])) for start in starts]
        )

    def tokenize(self, *texts: Sequence[Any], **options: Any) -> tuple[Any, list[bool]]:
        """Tokenizes texts, or pairs of texts, and cuts them at the longest length.

        Returns:
            The tokenizer's encoding, and for each text whether it was cut.
        """
        encoded = self.tokenizer(*map(list, texts), truncation=True, max_length=self.max_length, **options)
        return encoded, [bool(each.overflowing) for each in encoded.encodings]

    def learn_names(self, used: Iterable[str], declared: list[str] | None) -> list[str]:
        """Returns the names of the labels: those declared, or those of the training rows. Warns of rare labels.

        Args:
            used: the labels of all training rows.
            declared: the names that the data declares, in the order of their numbers.
        """
        counts = Counter(used)
        names = declared or sort_names(counts)
        self.facts["labels"] = {name: counts[name] for name in names}
        shown = ", ".join(f"{elide(name)!r} {counts[name]:,}" for name in names[:LABELS_SHOWN])
        more = f" and {len(names) - LABELS_SHOWN:,} more" if len(names) > LABELS_SHOWN else ""
        logger.info("%s labels to learn: %s%s.", f"{len(names):,}", shown, more)
        # Most words are outside of any span.
        warn_of_imbalance(Counter({name: number for name, number in counts.items() if name != "O"}))
        return names

    def count_truncated(self, truncated: Iterable[bool], part: str) -> None:
        """Warns of rows whose texts were cut, and counts them."""
        rows = list(truncated)
        problem = f"are longer than {self.max_length} tokens (`max_length`) and were cut"
        self.warn_and_count("truncated", sum(rows), len(rows), part, problem)

    # The model

    def config_fields(self) -> dict[str, Any]:
        """Returns the fields of the model's configuration that the task sets."""
        return {}

    def collator(self) -> Any:
        """Returns the collator of the batches; this one pads to the longest text of the batch."""
        return DataCollatorWithPadding(self.tokenizer)

    @abstractmethod
    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        """Returns the metrics of the model's predictions for the held-out rows."""

    def baselines(self) -> dict[str, float]:
        """Returns the values of some metrics for a guess without the text, as `<metric>_baseline`."""
        return {}

    @abstractmethod
    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        """Returns the prediction for each held-out row, in values that JSON can hold."""

    def confusion(self, logits: Any) -> tuple[list[str], np.ndarray] | None:
        """Returns the classes and their confusion matrix, (label, prediction); None if the task has no classes."""
        return None


def elide(name: str) -> str:
    """Returns a name, with an ellipsis for its middle if it is long."""
    return name if len(name) <= 48 else f"{name[:23]} … {name[-22:]}"


def named_labels(names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a configuration that name the labels."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def compute_metrics(metrics: Iterable[type], predictions: Any, references: Any) -> dict[str, float]:
    """Computes several metrics of the same predictions; of two values with one name the first is kept."""
    figures: dict[str, float] = {}
    for metric in metrics:
        for name, value in metric().compute(predictions=predictions, references=references).items():
            figures.setdefault(name, value)
    return figures


def scores_of(logits: Any) -> np.ndarray:
    """Returns the scores of a model's output, which is a tuple if the model returns hidden states as well."""
    return np.asarray(logits[0] if isinstance(logits, (tuple, list)) else logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of scores, over the last axis."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
