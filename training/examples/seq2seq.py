"""Sequence-to-sequence examples: tokenised pairs, in batches of similar lengths."""

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

# Part of the cache key: increase it with each change that makes other rows of the same pairs.
FORMAT_VERSION = 1

# Number of batches whose examples are sorted by length together. More batches mean less padding, but a less random
# order.
_SORTED_TOGETHER = 32

_FEATURES = Features({"source": Sequence(Value("int32")), "target": Sequence(Value("int32"))})


class PairExample(TypedDict):
    """One pair without padding; the last label is the end token."""

    input_ids: np.ndarray
    labels: np.ndarray


def tokenize_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int) -> Dataset:
    """Tokenises pairs: sources with the special tokens that the tokenizer adds, targets followed by the end token.

    The result is cached under a key made of the pairs, the tokenizer and the length. Pairs that are too long are left
    out; a warning gives their number.

    Args:
        pairs: rows with a `source` and a `target`, such as those of `load_pairs` and `load_dates`.
        tokenizer: tokenizer of the texts. The name of a special token in a text is treated as text.
        max_length: length of the longest source and of the longest target, in tokens, special tokens included.

    Returns:
        One row per pair, with the ids of `source` and of `target`.

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
    """A random order of examples in which the examples of a batch have similar lengths.

    Examples that do not fill a batch come last; they are chosen at random, whatever their lengths.

    Args:
        lengths: lengths of the examples.
        batch_size: number of consecutive examples that make a batch.
        rng: random generator that draws the order.
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
        pairs: the result of `tokenize_pairs`.
        batch_size: batch size of the run, over all processes.
        seed: seed of the run.
    """

    pairs: Dataset
    batch_size: int
    seed: int = 0

    @cached_property
    def _columns(self) -> tuple[FlatColumn, FlatColumn]:
        return FlatColumn(self.pairs, "source"), FlatColumn(self.pairs, "target")

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens in each pair, source and target together."""
        source, target = self._columns
        return source.lengths + target.lengths

    def epoch(self, number: int) -> EpochDataset[PairExample]:
        """The examples of an epoch, in the order of that epoch."""
        rng = np.random.default_rng([self.seed, number])
        return EpochDataset(batched_by_length(self.lengths, self.batch_size, rng), self._build)

    def in_order(self) -> EpochDataset[PairExample]:
        """All examples, in the order of the rows."""
        return EpochDataset(np.arange(len(self.pairs)), self._build)

    def _build(self, row: int, index: int) -> PairExample:
        source, target = (column.row(row) for column in self._columns)
        return PairExample(input_ids=source, labels=target)


def padded(rows: list[np.ndarray], filler: int) -> Tensor:
    """Stacks rows of ids to (batch, longest), with the filler after the shorter ones."""
    stacked = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return torch.from_numpy(stacked)


@dataclass(frozen=True)
class PairCollator:
    """Pads pairs to the length of the longest and stacks them.

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
