"""BERT's pretraining data: sentence pairs with masked tokens, as a function of the seed, the epoch and the index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...modeling.packing import sequence_bounds
from .masking import IGNORED, Masking
from .sentence_pairs import SentenceIndex, plan_pairs, plan_segments, truncated
from .tokenized import FlatColumn


class Example(TypedDict):
    """One example, unpadded; `next_sentence_label` is 0 if the second segment follows the first, 1 if it is random."""

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    labels: np.ndarray
    next_sentence_label: int


@dataclass(frozen=True)
class BertExamples:
    """Makes the examples of each epoch from a tokenised corpus.

    Args:
        corpus: what `tokenize_documents` gave, with word starts if whole words are masked.
        tokenizer: gives the special tokens.
        masking: chooses and hides what is to be predicted.
        max_length: the longest example, special tokens included.
        seed: of the run.
        next_sentence: whether examples are pairs, half of them with a second segment from another document, or else
            single segments.
        short_seq_prob: share of documents whose examples are made shorter, so that the model sees short input too.

    Raises:
        ValueError: if `max_length` leaves no room for two tokens, the share is not one, or the corpus has no pairs.
    """

    corpus: Dataset
    tokenizer: PreTrainedTokenizerBase
    masking: Masking
    max_length: int = 128
    seed: int = 0
    next_sentence: bool = True
    short_seq_prob: float = 0.1

    def __post_init__(self) -> None:
        least = self._specials + 2
        if self.max_length < least:
            raise ValueError(
                f"`max_length` ({self.max_length}) must be at least {least}: {self._specials} special tokens and 2"
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"`short_seq_prob` ({self.short_seq_prob}) must be at least 0 and at most 1")

    @property
    def _specials(self) -> int:
        return 3 if self.next_sentence else 2

    @cached_property
    def _index(self) -> SentenceIndex:
        lengths = FlatColumn(self.corpus, "sentence_lengths")
        # Two halves of the room, so that what has no sentences still makes pairs.
        room = self.max_length - self._specials
        return SentenceIndex(lengths, lengths.lengths, room // 2 if self.next_sentence else room)

    def epoch(self, number: int) -> Epoch:
        """The examples of an epoch, in its order."""
        plan = plan_pairs if self.next_sentence else plan_segments
        rows = plan(self._index, self.max_length - self._specials, self.seed, number, self.short_seq_prob)
        return Epoch(self, number, rows, np.random.default_rng([self.seed, number]).permutation(len(rows)))


class Epoch(torch.utils.data.Dataset):
    """The examples of one epoch. Example i depends on the seed, the epoch and i, and on nothing drawn before.

    Args:
        examples: makes them.
        number: of the epoch.
        rows: what they are made of, as `plan_pairs` gives it.
        order: the row of each example.
    """

    def __init__(self, examples: BertExamples, number: int, rows: np.ndarray, order: np.ndarray) -> None:
        self.examples, self.number, self.rows, self.order = examples, number, rows, order
        self._ids = FlatColumn(examples.corpus, "ids")
        words = examples.masking.whole_words
        self._starts_word = FlatColumn(examples.corpus, "starts_word") if words else None
        tokenizer = examples.tokenizer
        self._cls, self._sep = tokenizer.cls_token_id, tokenizer.sep_token_id

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def random_share(self) -> float:
        """The share of examples whose second segment comes from another document."""
        return float(self.rows[:, 4].mean())

    def __getitem__(self, index: int) -> Example:
        """Builds an example.

        Raises:
            IndexError: if the epoch has no such example.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of an epoch with {len(self)}")
        examples = self.examples
        rng = np.random.default_rng([examples.seed, self.number, index])
        first_start, first_stop, second_start, second_stop, is_random = self.rows[self.order[index]].tolist()
        room = examples.max_length - examples._specials
        lengths = truncated(first_stop - first_start, second_stop - second_start, room)
        segments = [_cut(first_start, first_stop, lengths[0], rng)]
        if examples.next_sentence:
            segments.append(_cut(second_start, second_stop, lengths[1], rng))

        ids, types, starts = [np.array([self._cls])], [np.zeros(1, dtype=np.int64)], [np.array([True])]
        for number, (start, stop) in enumerate(segments):
            ids += [self._ids[start:stop], np.array([self._sep])]
            types.append(np.full(stop - start + 1, number))
            if self._starts_word is not None:
                starts += [self._starts_word[start:stop], np.array([True])]
        shown, labels = examples.masking(np.concatenate(ids), np.concatenate(starts), rng)
        return Example(
            input_ids=shown, token_type_ids=np.concatenate(types), labels=labels, next_sentence_label=is_random
        )


def _cut(start: int, stop: int, length: int, rng: np.random.Generator) -> tuple[int, int]:
    """Cuts a span to a length, each token from its front or its back by chance."""
    excess = stop - start - length
    from_front = int(rng.binomial(excess, 0.5))
    return start + from_front, stop - (excess - from_front)


@dataclass(frozen=True)
class BertCollator:
    """Packs examples into one row, one after another, without padding.

    Args:
        next_sentence: whether the batch holds `next_sentence_label`.
    """

    next_sentence: bool = True

    def __call__(self, examples: list[Example]) -> dict[str, Any]:
        """Makes a batch.

        Returns:
            `input_ids`, `token_type_ids` and `labels`, each (1, tokens of all); `predicted_positions`, the places that
            have a label; where each example begins and ends, as transformers' `DataCollatorWithFlattening` tells it;
            and `next_sentence_label`, one for each.
        """
        columns = {
            "input_ids": [example["input_ids"] for example in examples],
            "token_type_ids": [example["token_type_ids"] for example in examples],
            "labels": [example["labels"] for example in examples],
        }
        batch: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate(column)).unsqueeze(0) for name, column in columns.items()
        }
        batch["predicted_positions"] = (batch["labels"][0] != IGNORED).nonzero().squeeze(1)
        batch |= sequence_bounds(torch.tensor([len(example["input_ids"]) for example in examples]))._asdict()
        if self.next_sentence:
            batch["next_sentence_label"] = torch.tensor([example["next_sentence_label"] for example in examples])
        return batch
