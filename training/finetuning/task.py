"""What all tasks that a model can be fine-tuned for share: reading rows, encoding them, counting what is amiss.

A task is made for one run. `parse` takes in its rows, `prepare` encodes them, and the rest serves `Trainer`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerFast

from ..reading.tables import Column
from ..run.settings import held_out_share
from .labels import Row, Table, draw, sort_names, warn_of_imbalance

if TYPE_CHECKING:
    from .settings import FinetuneSettings

logger = logging.getLogger("regard.training")

ENCODED_AT_ONCE = 1000

# So many labels are told with the number of their rows.
SHOWN = 10

# Of these metrics the least is the best.
ERRORS = ("loss", "mse")


def belongs_to_some_tasks(setting: str) -> bool:
    """Whether a setting, by its name, is of those tasks alone that have it among their own."""
    return setting.endswith("_column") or setting in ("stride", "max_answer_length")


class FinetuneTask(ABC):
    """What fine-tuning for one task differs in from another's.

    Attributes:
        name: as the command line has it.
        auto_class: transformers' class of such models.
        best_by: the metric by which the best model is chosen if nothing is said.
        measured: the metrics that `metric` can name, beside the loss.
        label_inputs: what the model learns from, by the names of its arguments.
        own_settings: those of its columns, and others that not every task has.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    best_by: str
    measured: Sequence[str]
    label_inputs: ClassVar[Sequence[str]] = ("labels",)
    own_settings: ClassVar[Sequence[str]]

    def __init__(self, settings: FinetuneSettings) -> None:
        self.settings = settings
        self._check_settings()
        self.tokenizer: PreTrainedTokenizerFast
        self.max_length = 0
        self.held_out: list[Row] = []
        self.told: dict[str, Any] = {}

    def _check_settings(self) -> None:
        columns = self.columns()
        usual = type(self.settings)()
        for name, value in vars(self.settings).items():
            if belongs_to_some_tasks(name) and name not in self.own_settings and value != getattr(usual, name):
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
        """The columns that rows must have."""

    @abstractmethod
    def parse(self, row: Row, where: str, features: Any) -> Row | None:
        """What a row holds for the task; None if a text is empty.

        Raises:
            ValueError: if it holds something else.
        """

    def stratum(self, example: Row) -> Hashable:
        """The group of an example; of each group the same share is held out."""
        return None

    def labels_of(self, example: Row) -> set[str]:
        """The labels of an example that may be in few others; there must be one to learn each from."""
        return set()

    def read(self, table: Table, part: str) -> list[Row]:
        """Parses rows; those with an empty text are left out, with a warning.

        Args:
            table: that holds them.
            part: what the warning calls them.

        Raises:
            ValueError: if a row holds what it should not, or none is left.
        """
        full, features = [], table.rows.features
        for row, where in zip(table.rows, table.places(), strict=True):
            parsed = self.parse(row, where, features)
            if parsed is not None:
                # The row as it was, for the predictions.
                full.append({**parsed, "row": row, "where": where})
        total = len(table.rows)
        self.count("empty", total - len(full), total, part, "have an empty text and are left out")
        if not full:
            raise ValueError(f"no row of {part} is left to use")
        return full

    def count(self, key: str, number: int, total: int, part: str, told: str) -> None:
        """Warns of rows that something is amiss with, and keeps their number for the results."""
        if number:
            logger.warning("%s of %s rows of %s %s.", f"{number:,}", f"{total:,}", part, told)
            self.told.setdefault("warnings", {}).setdefault(part, {})[key] = number

    # Encoding

    def prepare(
        self, tokenizer: PreTrainedTokenizerFast, max_length: int, table: Table, held_out: Table | None
    ) -> tuple[Dataset, Dataset]:
        """Parses and encodes the rows to train on and those held out.

        Args:
            tokenizer: of the model.
            max_length: of a text, in tokens.
            table: the rows to train on.
            held_out: those held out; None: the share of the others that `validation` tells.

        Raises:
            ValueError: if one of them won't do.
        """
        self.tokenizer, self.max_length = tokenizer, max_length
        examples = self.read(table, "data")
        if held_out is None:
            examples, self.held_out = self._hold_out(examples)
        else:
            self.held_out = self.read(held_out, "validation")
        logger.info("%s rows to train on, %s held out.", f"{len(examples):,}", f"{len(self.held_out):,}")
        self.learn_labels(examples, table.rows.features)
        self.told |= {"rows": len(examples), "held_out_rows": len(self.held_out)}
        return self.encode(examples, "data"), self.encode(self.held_out, "validation")

    def _hold_out(self, examples: list[Row]) -> tuple[list[Row], list[Row]]:
        share = held_out_share(self.settings.validation)
        assert share is not None
        drawn = set(draw([self.stratum(example) for example in examples], share, self.settings.seed))
        kept = [example for place, example in enumerate(examples) if place not in drawn]
        known = {label for example in kept for label in self.labels_of(example)}
        for place in sorted(drawn):
            labels = self.labels_of(examples[place])
            if not labels <= known:
                # Else there would be nothing to learn one of them from.
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
    def learn_labels(self, examples: Sequence[Row], features: Any) -> None:
        """Takes from the examples what labels there are.

        Raises:
            ValueError: if there are too few, or the held-out rows have others.
        """

    @abstractmethod
    def encode(self, examples: Sequence[Row], part: str) -> Dataset:
        """The inputs and labels of the examples."""

    def in_batches(self, examples: Sequence[Row], encode: Callable[[Sequence[Row]], dict[str, Any]]) -> Dataset:
        """Encodes examples a batch at a time, which takes less memory than all at once."""
        starts = range(0, len(examples), ENCODED_AT_ONCE)
        return concatenate_datasets(
            [Dataset.from_dict(encode(examples[start : start + ENCODED_AT_ONCE])) for start in starts]
        )

    def tokenize(self, *texts: Sequence[Any], **options: Any) -> tuple[Any, list[bool]]:
        """Tokenizes texts, or pairs of them, up to the longest length.

        Returns:
            What the tokenizer gives, and for each text whether it was too long.
        """
        encoded = self.tokenizer(*map(list, texts), truncation=True, max_length=self.max_length, **options)
        return encoded, [bool(each.overflowing) for each in encoded.encodings]

    def learn_names(self, used: Iterable[str], declared: list[str] | None) -> list[str]:
        """The labels' names: those declared, or those of the training rows. Warns if some are rare.

        Args:
            used: the label of each row, or each of several.
            declared: by the data set.
        """
        counts = Counter(used)
        names = declared or sort_names(counts)
        self.told["labels"] = {name: counts[name] for name in names}
        shown = ", ".join(f"{shorten(name)!r} {counts[name]:,}" for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        logger.info("%s labels to learn: %s%s.", f"{len(names):,}", shown, more)
        # Most words are outside of any span.
        warn_of_imbalance(Counter({name: number for name, number in counts.items() if name != "O"}))
        return names

    def count_truncated(self, truncated: Iterable[bool], part: str) -> None:
        """Warns of rows whose texts were too long."""
        rows = list(truncated)
        told = f"are longer than {self.max_length} tokens (`max_length`) and were cut"
        self.count("truncated", sum(rows), len(rows), part, told)

    # The model

    def config_fields(self) -> dict[str, Any]:
        """Fields of the model's configuration that the task decides."""
        return {}

    def collator(self) -> Any:
        """Pads a batch to its own longest text."""
        return DataCollatorWithPadding(self.tokenizer)

    @abstractmethod
    def metrics(self, outcome: EvalPrediction) -> dict[str, float]:
        """The metrics of the held-out rows."""

    def baselines(self) -> dict[str, float]:
        """What some metrics of the held-out rows would be without a look at the texts, named `metric_baseline`."""
        return {}

    @abstractmethod
    def predictions(self, logits: Any) -> list[dict[str, Any]]:
        """For each held-out row what the model makes of it, in plain values."""

    def confusion(self, logits: Any) -> tuple[list[str], np.ndarray] | None:
        """The classes, and how often each (row) was taken for each (column); None if the task has no classes."""
        return None


def shorten(name: str) -> str:
    """A name, without its middle if it is long."""
    return name if len(name) <= 48 else f"{name[:23]} … {name[-22:]}"


def named_labels(names: Sequence[str]) -> dict[str, Any]:
    """The configuration fields that give labels their names."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def measure(kinds: Iterable[type], predictions: Any, references: Any) -> dict[str, float]:
    """Computes metrics of the same predictions."""
    figures: dict[str, float] = {}
    for kind in kinds:
        for name, value in kind().compute(predictions=predictions, references=references).items():
            # Where two metrics have a figure of the same name, the first one's counts.
            figures.setdefault(name, value)
    return figures


def first(logits: Any) -> np.ndarray:
    """The scores, where a model gives more than these."""
    return np.asarray(logits[0] if isinstance(logits, (tuple, list)) else logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    """The probabilities of scores."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
