"""Sequence-to-sequence training data: tokenised pairs, in batches of like lengths."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np
import torch
from datasets import Dataset, Features, Sequence, Value
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .epoch import EpochDataset
from .masking import IGNORED
from .tokenized import FlatColumn, plain_backend

logger = logging.getLogger("regard.training")

# Part of the cache key: raise it whenever the same pairs would give other rows than before.
FORMAT_VERSION = 1

# So many batches' worth of examples are sorted by length together: more gives less padding, and less chance.
_SORTED_TOGETHER = 32

_FEATURES = Features({"source": Sequence(Value("int32")), "target": Sequence(Value("int32"))})


class PairExample(TypedDict):
    """One pair, unpadded; the target's end token is its last label."""

    input_ids: np.ndarray
    labels: np.ndarray


def tokenize_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int) -> Dataset:
    """Turns texts into ids: sources as the tokenizer's call gives them, targets with the end token behind.

    The result is cached by the pairs, the tokenizer and the length. Pairs that are too long are left out, and counted
    in a warning.

    Args:
        pairs: rows with a `source` and a `target`, as `load_pairs` and `load_dates` give them.
        tokenizer: gives the ids. A special token's name in a text is read as text.
        max_length: the longest source, and the longest target, in tokens, special tokens included.

    Returns:
        One row per pair: the ids of `source` and of `target`.

    Raises:
        ValueError: if all pairs are too long.
    """
    backend = plain_backend(tokenizer)
    end = tokenizer.eos_token_id

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        sources = backend.encode_batch(batch["source"])
        targets = backend.encode_batch(batch["target"], add_special_tokens=False)
        rows: dict[str, list[list[int]]] = {"source": [], "target": []}
        for source, target in zip(sources, targets, strict=True):
            if len(source) <= max_length and len(target) < max_length:
                rows["source"].append(source.ids)
                rows["target"].append([*target.ids, end])
        return rows

    tokenized = pairs.map(
        tokenize,
        batched=True,
        remove_columns=pairs.column_names,
        features=_FEATURES,
        new_fingerprint=Hasher.hash((pairs._fingerprint, backend.to_str(), end, max_length, FORMAT_VERSION)),
        desc="Tokenising",
    )
    too_long = len(pairs) - len(tokenized)
    if not len(tokenized):
        raise ValueError(f"all {too_long:,} pairs are longer than `max_length` ({max_length}): raise it")
    if too_long:
        logger.warning(
            "%s of %s pairs are longer than `max_length` (%d) and left out.", too_long, len(pairs), max_length
        )
    return tokenized


def batched_by_length(lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """An order of examples in which those of a batch are of like length, and all else is by chance.

    Those that make no whole batch come last; they too are chosen by chance, whatever their length.

    Args:
        lengths: of the examples.
        batch_size: consecutive examples that make a batch.
        rng: draws the order.
    """
    order = rng.permutation(len(lengths))
    whole = len(order) // batch_size * batch_size
    pool = batch_size * _SORTED_TOGETHER
    for start in range(0, whole, pool):
        part = order[start : min(start + pool, whole)]
        part[:] = part[np.argsort(lengths[part], kind="stable")]
    batches = rng.permutation(order[:whole].reshape(-1, batch_size))
    return np.concatenate([batches.reshape(-1), order[whole:]])


@dataclass(frozen=True)
class PairExamples:
    """Makes the examples of each epoch from tokenised pairs.

    Args:
        pairs: what `tokenize_pairs` gave.
        batch_size: of the run, over all processes.
        seed: of the run.
    """

    pairs: Dataset
    batch_size: int
    seed: int = 0

    @cached_property
    def _columns(self) -> tuple[FlatColumn, FlatColumn]:
        return FlatColumn(self.pairs, "source"), FlatColumn(self.pairs, "target")

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each pair, source and target together."""
        source, target = self._columns
        return source.lengths + target.lengths

    def epoch(self, number: int) -> EpochDataset[PairExample]:
        """The examples of an epoch, in its order."""
        rng = np.random.default_rng([self.seed, number])
        return EpochDataset(batched_by_length(self.lengths, self.batch_size, rng), self._build)

    def in_order(self) -> EpochDataset[PairExample]:
        """All examples, in the order of the rows."""
        return EpochDataset(np.arange(len(self.pairs)), self._build)

    def _build(self, row: int, index: int) -> PairExample:
        source, target = (column.row(row) for column in self._columns)
        return PairExample(input_ids=source, labels=target)


def padded(rows: list[np.ndarray], filler: int) -> Tensor:
    """Stacks rows of ids, (batch, longest), with a filler behind the shorter ones."""
    stacked = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return torch.from_numpy(stacked)


@dataclass(frozen=True)
class PairCollator:
    """Pads pairs to the longest among them and stacks them.

    Args:
        pad_id: id of the padding token.
    """

    pad_id: int

    def __call__(self, examples: list[PairExample]) -> dict[str, Tensor]:
        """Makes a batch of `input_ids`, `attention_mask` (batch, source) and `labels` (batch, target)."""
        sources = [example["input_ids"] for example in examples]
        lengths = torch.tensor([len(source) for source in sources])
        return {
            "input_ids": padded(sources, self.pad_id),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long(),
            "labels": padded([example["labels"] for example in examples], IGNORED),
        }
