"""Language modeling data: a tokenised corpus cut into blocks of one length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from .masking import IGNORED
from .seq2seq import padded
from .tokenized import FlatColumn


@dataclass(frozen=True)
class BlockExamples:
    """Makes the examples of each epoch from a tokenised corpus, whose documents stand one behind the other.

    Args:
        corpus: what `tokenize_texts` gave.
        length: of a block, in tokens.
        seed: of the run.

    Raises:
        ValueError: if the length leaves nothing to predict.
    """

    corpus: Dataset
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"`max_length` ({self.length}) must be at least 2: one token, and one to predict")

    @cached_property
    def ids(self) -> FlatColumn:
        """The ids of all documents."""
        return FlatColumn(self.corpus, "ids")

    def epoch(self, number: int) -> BlockEpoch:
        """The whole blocks of an epoch, in its order. Another epoch cuts at other places."""
        rng = np.random.default_rng([self.seed, number])
        offset = int(rng.integers(min(self.length, max(1, len(self.ids) - self.length + 1))))
        starts = np.arange(offset, len(self.ids) - self.length + 1, self.length)
        return BlockEpoch(self, rng.permutation(starts))

    def in_order(self) -> BlockEpoch:
        """Blocks that hold every token once; the last may be shorter."""
        starts = np.arange(0, len(self.ids), self.length)
        # One token by itself predicts nothing.
        return BlockEpoch(self, starts[len(self.ids) - starts > 1])


class BlockEpoch(torch.utils.data.Dataset):
    """Blocks in some order."""

    def __init__(self, examples: BlockExamples, starts: np.ndarray) -> None:
        self._ids, self._length, self.starts = examples.ids, examples.length, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Reads a block.

        Raises:
            IndexError: if there is no such block.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = int(self.starts[index])
        return self._ids[slice(start, min(start + self._length, len(self._ids)))]


@dataclass(frozen=True)
class BlockCollator:
    """Stacks blocks.

    Args:
        pad_id: fills up a block that is shorter than others.
    """

    pad_id: int

    def __call__(self, examples: list[np.ndarray]) -> dict[str, Tensor]:
        """Makes a batch of `input_ids`, `attention_mask` and `labels`, each (batch, length)."""
        lengths = torch.tensor([len(example) for example in examples])
        input_ids = padded(examples, self.pad_id)
        mask = torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)
        labels = input_ids.masked_fill(~mask, IGNORED)
        return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
