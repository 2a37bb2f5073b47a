"""Language modeling examples: a tokenised corpus, cut into chunks of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from .epoch import EpochDataset
from .masking import IGNORED
from .seq2seq import padded
from .tokenized import FlatColumn


@dataclass(frozen=True)
class ChunkExamples:
    """Makes the examples of each epoch from a tokenised corpus, whose documents are joined into one text.

    Args:
        corpus: the result of `tokenize_texts`.
        length: length of a chunk in tokens.
        seed: seed of the run.

    Raises:
        ValueError: if `length` is less than 2, which leaves nothing to predict.
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

    def epoch(self, number: int) -> EpochDataset[np.ndarray]:
        """The full-length chunks of an epoch, in its order. Each epoch cuts the text at different positions."""
        rng = np.random.default_rng([self.seed, number])
        offset = int(rng.integers(min(self.length, max(1, len(self.ids) - self.length + 1))))
        starts = np.arange(offset, len(self.ids) - self.length + 1, self.length)
        return EpochDataset(rng.permutation(starts), self._build)

    def in_order(self) -> EpochDataset[np.ndarray]:
        """The whole text in chunks, in order; the last chunk may be shorter."""
        starts = np.arange(0, len(self.ids), self.length)
        # A chunk of one token has nothing to predict.
        return EpochDataset(starts[len(self.ids) - starts > 1], self._build)

    def _build(self, start: int, index: int) -> np.ndarray:
        return self.ids[slice(start, min(start + self.length, len(self.ids)))]


@dataclass(frozen=True)
class ChunkCollator:
    """Pads chunks to the length of the longest and stacks them.

    Args:
        pad_id: id of the padding token.
    """

    pad_id: int

    def __call__(self, examples: list[np.ndarray]) -> dict[str, Tensor]:
        """Makes a batch of `input_ids`, `attention_mask` and `labels`, each (batch, length)."""
        lengths = torch.tensor([len(example) for example in examples])
        input_ids = padded(examples, self.pad_id)
        mask = torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)
        labels = input_ids.masked_fill(~mask, IGNORED)
        return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels}
