"""Plans of BERT's training examples: the spans of the corpus that each example consists of.

Devlin et al. (2019), https://arxiv.org/abs/1810.04805, appendix A.2. The examples of an epoch depend only on the
lengths of the sentences, the seed and the number of the epoch.

Lengths and positions are in tokens; positions are counted from the start of the whole corpus.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..reading.cache import mapped
from .tokenized import FlatColumn

# Number of sentences or examples to hold in memory at once: all those of a large corpus would not fit.
_AT_ONCE = 2**18

# Start and stop of the first span, start and stop of the second, and whether the second is random.
_Row = tuple[int, int, int, int, bool]


class SentenceIndex:
    """The positions at which the sentences and documents of a corpus begin. Those of sentences are memory-mapped.

    Args:
        sentence_lengths: lengths of all sentences, in order; an array, or a column of a data set.
        sentences_per_document: number of sentences in each document.
        longest: length of the longest sentence. Longer sentences are cut into pieces of this length, which then count
            as sentences, so that a text without full stops is used in full.
    """

    def __init__(
        self, sentence_lengths: np.ndarray | FlatColumn, sentences_per_document: np.ndarray, longest: int
    ) -> None:
        # The index of each document's first sentence; `_bounds` turns it into the index of the first piece.
        documents = _cumulated(sentences_per_document)
        self.bounds = mapped(_bounds(sentence_lengths, documents, longest))
        # Documents without tokens have no sentence that could be drawn.
        self.documents = np.concatenate([documents[:1], documents[1:][np.diff(documents) > 0]])

    @property
    def num_documents(self) -> int:
        """Number of documents with text."""
        return len(self.documents) - 1


def _cumulated(numbers: np.ndarray) -> np.ndarray:
    """The sum of the numbers before each number, followed by the sum of all."""
    sums = np.zeros(len(numbers) + 1, dtype=np.int64)
    np.cumsum(numbers, out=sums[1:])
    return sums


def _bounds(lengths: np.ndarray | FlatColumn, documents: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Yields the start of each piece of a sentence, and the end of the last; changes `documents` to count pieces."""
    yield np.zeros(1, dtype=np.int64)
    pieces_done, tokens_done, documents_done = 0, 0, 0
    for start in range(0, len(lengths), _AT_ONCE):
        part = lengths[start : min(start + _AT_ONCE, len(lengths))]
        pieces = -(-part // longest)
        pieces_before = _cumulated(pieces)
        of_pieces = np.full(int(pieces_before[-1]), longest, dtype=np.int64)
        of_pieces[pieces_before[1:] - 1] = part - (pieces - 1) * longest
        ends = tokens_done + np.cumsum(of_pieces)
        yield ends
        until = documents_done + int(np.searchsorted(documents[documents_done:], start + len(part)))
        documents[documents_done:until] = pieces_done + pieces_before[documents[documents_done:until] - start]
        pieces_done, documents_done = pieces_done + len(ends), until
        tokens_done = int(ends[-1])
    documents[documents_done:] = pieces_done


def plan_pairs(
    index: SentenceIndex, max_tokens: int, seed: int, epoch: int, short_seq_prob: float = 0.1
) -> np.ndarray:
    """Plans the sentence pairs of an epoch.

    Sentences of a document are collected up to the target length and split in two at a random sentence. In half of
    the examples, the second part follows the first; in the others, it is replaced by sentences of another document,
    and its own sentences are used for the next example. A document with a single sentence yields no pair: it only
    serves as the other document, so that both kinds of pairs stay equally frequent.

    Args:
        index: sentences and documents of the corpus.
        max_tokens: length of the longest pair, without special tokens.
        seed: seed of the run.
        epoch: number of the epoch.
        short_seq_prob: share of documents whose examples have a random shorter target length.

    Returns:
        One row for each example, in the order of the corpus: start and stop of the first span, start and stop of the
        second, and 1 if the second is random, else 0. The spans are not yet cut to `max_tokens`. The array is
        memory-mapped.

    Raises:
        ValueError: if the corpus has fewer than two documents, or no document with two sentences.
    """
    if index.num_documents < 2:
        raise ValueError(
            f"next sentence prediction needs at least 2 documents, but the corpus has {index.num_documents}: "
            "add documents, split the text into several (`documents`), or train without next sentences"
        )
    rows = _table(_pairs(index, max_tokens, random.Random(f"pairs {seed} {epoch}"), short_seq_prob))
    if not len(rows):
        raise ValueError(
            "no document has two sentences to make a pair of: "
            "make documents longer (`documents`), or train without next sentences"
        )
    return rows


def _pairs(index: SentenceIndex, max_tokens: int, rng: random.Random, short_seq_prob: float) -> Iterator[_Row]:
    bounds, documents = _numbers(index)
    for document in range(index.num_documents):
        begin, end = documents[document], documents[document + 1]
        if end - begin < 2:
            continue
        target = _draw_target(rng, max_tokens, short_seq_prob)
        sentence = begin
        while sentence < end:
            stop = _gather(bounds, sentence, end, target)
            is_random = rng.random() < 0.5
            if stop - sentence == 1 and not is_random:
                # A single sentence is paired with the next one, or with the previous one at the end of a document.
                sentence = min(sentence, end - 2)
                stop = sentence + 2
            middle = rng.randint(sentence + 1, stop - 1) if stop - sentence > 1 else stop
            if is_random:
                other = rng.randrange(index.num_documents - 1)
                other += other >= document
                other_start = rng.randrange(documents[other], documents[other + 1])
                rest = target - (bounds[middle] - bounds[sentence])
                second = (other_start, _gather(bounds, other_start, documents[other + 1], rest))
            else:
                second = (middle, stop)
            yield bounds[sentence], bounds[middle], bounds[second[0]], bounds[second[1]], is_random
            sentence = middle if is_random else stop


def plan_segments(
    index: SentenceIndex, max_tokens: int, seed: int, epoch: int, short_seq_prob: float = 0.1
) -> np.ndarray:
    """Plans the examples of an epoch without next sentence prediction.

    Each example consists of as many consecutive sentences of one document as fit.

    Args:
        index: sentences and documents of the corpus.
        max_tokens: length of the longest segment, without special tokens.
        seed: seed of the run.
        epoch: number of the epoch.
        short_seq_prob: share of documents whose examples have a random shorter length.

    Returns:
        Rows like those of `plan_pairs`, with an empty second span.

    Raises:
        ValueError: if the corpus has no tokens.
    """
    rows = _table(_segments(index, max_tokens, random.Random(f"segments {seed} {epoch}"), short_seq_prob))
    if not len(rows):
        raise ValueError("no document holds a token")
    return rows


def _segments(index: SentenceIndex, max_tokens: int, rng: random.Random, short_seq_prob: float) -> Iterator[_Row]:
    bounds, documents = _numbers(index)
    for begin, end in itertools.pairwise(documents):
        target = _draw_target(rng, max_tokens, short_seq_prob)
        sentence = begin
        while sentence < end:
            # The last sentence collected may exceed the target. Unless it is the only one, the next example begins
            # with it.
            stop = _gather(bounds, sentence, end, target + 1)
            if bounds[stop] - bounds[sentence] > target and stop - sentence > 1:
                stop -= 1
            yield bounds[sentence], bounds[stop], 0, 0, False
            sentence = stop


def _numbers(index: SentenceIndex) -> tuple[Sequence[int], Sequence[int]]:
    """Sentence bounds and documents as memoryviews, whose elements are Python numbers, which makes planning faster."""
    return index.bounds.data, index.documents.data


def _table(rows: Iterable[_Row]) -> np.ndarray:
    rows = iter(rows)
    numbers = np.dtype((np.int64, 5))

    def parts() -> Iterator[np.ndarray]:
        while True:
            part = np.fromiter(itertools.islice(rows, _AT_ONCE), numbers)
            yield part
            if len(part) < _AT_ONCE:
                return

    return mapped(parts())


def _draw_target(rng: random.Random, max_tokens: int, short_seq_prob: float) -> int:
    return rng.randint(2, max_tokens) if rng.random() < short_seq_prob else max_tokens


def _gather(bounds: Sequence[int], sentence: int, end: int, target: int) -> int:
    """The sentence at whose start `target` tokens have been reached since the start of `sentence`; at most `end`."""
    return max(sentence + 1, min(end, bisect.bisect_left(bounds, bounds[sentence] + target, sentence)))


def truncated(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """The lengths of two segments after tokens are removed from the longer one until both fit into `max_tokens`."""
    excess = max(0, first + second - max_tokens)
    from_longer = min(excess, abs(first - second))
    rest = excess - from_longer
    # When both are equally long, the second segment loses a token first.
    first_loses, second_loses = rest // 2, rest - rest // 2
    if first > second:
        first_loses += from_longer
    else:
        second_loses += from_longer
    return first - first_loses, second - second_loses
