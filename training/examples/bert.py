"""BERT's pretraining examples: sentence pairs with masked tokens, each a function of seed, epoch and index."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypedDict

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...modeling.packing import sequence_bounds
from .epoch import EpochDataset
from .masking import IGNORED, Masking
from .sentence_pairs import SentenceIndex, plan_pairs, plan_segments, truncated
from .tokenized import FlatColumn


class BertExample(TypedDict):
    """One example, unpadded; `next_sentence_label` is 0 if the second segment follows the first, 1 if it is random."""

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    labels: np.ndarray
    next_sentence_label: int


@dataclass(frozen=True)
class BertExamples:
    """Makes the examples of each epoch from a tokenised corpus.

    Args:
        corpus: the result of `tokenize_documents`, with word starts if whole words are masked.
        tokenizer: its special tokens are put around the segments.
        masking: chooses and hides the tokens to predict.
        max_length: length of the longest example in tokens, special tokens included.
        seed: seed of the run.
        next_sentence: whether examples are pairs of segments, half of them with a second segment from another
            document, instead of single segments.
        short_seq_prob: share of documents whose examples are made shorter, so that the model sees short input too.

    Raises:
        ValueError: if `max_length` leaves no room for two tokens, or the corpus has no pairs.
    """

    corpus: Dataset
    tokenizer: PreTrainedTokenizerBase
    masking: Masking
    max_length: int = 128
    seed: int = 0
    next_sentence: bool = True
    short_seq_prob: float = 0.1
    _plans: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        least = self._num_special + 2
        if self.max_length < least:
            raise ValueError(
                f"`max_length` ({self.max_length}) must be at least {least}: {self._num_special} special tokens and 2"
            )

    @property
    def _num_special(self) -> int:
        return 3 if self.next_sentence else 2

    @property
    def _room(self) -> int:
        """Number of tokens of an example that are not special."""
        return self.max_length - self._num_special

    @cached_property
    def _index(self) -> SentenceIndex:
        lengths = FlatColumn(self.corpus, "sentence_lengths")
        # A sentence takes half of the room at most, so that text without full stops makes pairs too.
        return SentenceIndex(lengths, lengths.lengths, self._room // 2 if self.next_sentence else self._room)

    @cached_property
    def ids(self) -> FlatColumn:
        """The ids of all documents."""
        return FlatColumn(self.corpus, "ids")

    @cached_property
    def _starts_word(self) -> FlatColumn | None:
        return FlatColumn(self.corpus, "starts_word") if self.masking.whole_words else None

    @cached_property
    def _cls_and_sep(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([self.tokenizer.cls_token_id]), np.array([self.tokenizer.sep_token_id])

    def plan(self, number: int) -> np.ndarray:
        """The segments of each example of an epoch, in the order of the corpus: the rows of `plan_pairs`.

        The last plan is kept, as planning takes time and the first one is needed more than once.
        """
        if number not in self._plans:
            make = plan_pairs if self.next_sentence else plan_segments
            self._plans.clear()
            self._plans[number] = make(self._index, self._room, self.seed, number, self.short_seq_prob)
        return self._plans[number]

    def random_share(self, number: int) -> float:
        """The share of an epoch's examples whose second segment comes from another document."""
        return float(self.plan(number)[:, 4].mean())

    def epoch(self, number: int) -> EpochDataset[BertExample]:
        """The examples of an epoch, in its order."""
        plan = self.plan(number)
        order = np.random.default_rng([self.seed, number]).permutation(len(plan))
        return EpochDataset(order, partial(self._build, number, plan))

    def _build(self, number: int, plan: np.ndarray, row: int, index: int) -> BertExample:
        # Nothing that was drawn before matters: the example is a function of the seed, the epoch and its index.
        rng = np.random.default_rng([self.seed, number, index])
        first_start, first_stop, second_start, second_stop, is_random = plan[row].tolist()
        lengths = truncated(first_stop - first_start, second_stop - second_start, self._room)
        segments = [_cut(first_start, first_stop, lengths[0], rng)]
        if self.next_sentence:
            segments.append(_cut(second_start, second_stop, lengths[1], rng))

        cls, sep = self._cls_and_sep
        ids, types, starts = [cls], [np.zeros(1, dtype=np.int64)], [np.array([True])]
        for segment, (start, stop) in enumerate(segments):
            ids += [self.ids[start:stop], sep]
            types.append(np.full(stop - start + 1, segment))
            if self._starts_word is not None:
                starts += [self._starts_word[start:stop], np.array([True])]
        shown, labels = self.masking(np.concatenate(ids), np.concatenate(starts), rng)
        return BertExample(
            input_ids=shown, token_type_ids=np.concatenate(types), labels=labels, next_sentence_label=is_random
        )


def _cut(start: int, stop: int, length: int, rng: np.random.Generator) -> tuple[int, int]:
    """Shortens a span to a length; each token is taken from the front or the back at random."""
    excess = stop - start - length
    from_front = int(rng.binomial(excess, 0.5))
    return start + from_front, stop - (excess - from_front)


@dataclass(frozen=True)
class BertCollator:
    """Packs examples into one row, one after another, without padding.

    Args:
        next_sentence: whether the batch has a `next_sentence_label`.
    """

    next_sentence: bool = True

    def __call__(self, examples: list[BertExample]) -> dict[str, Any]:
        """Makes a batch.

        Returns:
            `input_ids`, `token_type_ids` and `labels`, each (1, tokens of all examples); `predicted_positions`, the
            positions that have a label; the bounds of the examples, named as by transformers'
            `DataCollatorWithFlattening`; and `next_sentence_label`, one for each example.
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
