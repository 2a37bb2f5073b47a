"""BERT's training examples: which spans of a corpus make up each of them.

Devlin et al. (2019), https://arxiv.org/abs/1810.04805, appendix A.2. An epoch's examples are planned from the lengths
of the sentences alone, and are a function of the seed and the epoch.

Lengths and places are counted in tokens, places from the start of the whole corpus.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..reading.cache import mapped
from .tokenized import FlatColumn

# As many sentences or examples are in memory while a corpus is planned, which may have more than fit.
_AT_ONCE = 2**18

# Start and stop of the first span, start and stop of the second, whether that is random.
_Row = tuple[int, int, int, int, bool]


class SentenceIndex:
    """Where the sentences and documents of a corpus begin. What grows with the sentences is memory-mapped.

    Args:
        sentence_lengths: of all sentences, in order; an array, or a column of a data set.
        sentences_per_document: how many of them each document has.
        longest: longer sentences are cut into pieces of this length, which then count as sentences, so that a text
            without full stops is used in full.
    """

    def __init__(
        self, sentence_lengths: np.ndarray | FlatColumn, sentences_per_document: np.ndarray, longest: int
    ) -> None:
        # Of each document the number of its first sentence, which becomes that of its first piece.
        documents = _cumulated(sentences_per_document)
        self.bounds = mapped(_bounds(sentence_lengths, documents, longest))
        # Documents without a token hold no sentence, and could not be drawn from.
        self.documents = np.concatenate([documents[:1], documents[1:][np.diff(documents) > 0]])

    @property
    def num_documents(self) -> int:
        """Number of documents with text."""
        return len(self.documents) - 1


def _cumulated(numbers: np.ndarray) -> np.ndarray:
    """The sum of the numbers before each, and that of all."""
    sums = np.zeros(len(numbers) + 1, dtype=np.int64)
    np.cumsum(numbers, out=sums[1:])
    return sums


def _bounds(lengths: np.ndarray | FlatColumn, documents: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Where the pieces of sentences begin, and where the last one ends; `documents` is changed to count pieces."""
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

    Sentences of a document are gathered up to the target length and cut in two at a random sentence. For half of the
    examples the second part stays and follows the first; for the others it is replaced by sentences of another
    document, and gathered anew for the next example. A document of a single sentence has no pair of its own, and
    serves as the other document alone, so that both kinds stay equally frequent.

    Args:
        index: the corpus.
        max_tokens: the longest pair, without special tokens.
        seed: of the run.
        epoch: number of the epoch.
        short_seq_prob: share of documents whose examples have a random shorter target length.

    Returns:
        One row for each example: start and stop of the first span, start and stop of the second, 1 if that is random.
        In the order of the corpus, and not yet cut to `max_tokens`. Memory-mapped.

    Raises:
        ValueError: if there is no second document to draw from, or no document with two sentences.
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
                # A lone sentence gets its neighbour, at the end of a document the one before it.
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
    """Plans the examples of an epoch without next sentence prediction: as many sentences of one document as fit.

    Args:
        index: the corpus.
        max_tokens: the longest segment, without special tokens.
        seed: of the run.
        epoch: number of the epoch.
        short_seq_prob: share of documents whose examples have a random shorter length.

    Returns:
        Rows as of `plan_pairs`, with an empty second span.

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
            # The last sentence gathered overshoots, and opens the next example if it is not alone.
            stop = _gather(bounds, sentence, end, target + 1)
            if bounds[stop] - bounds[sentence] > target and stop - sentence > 1:
                stop -= 1
            yield bounds[sentence], bounds[stop], 0, 0, False
            sentence = stop


def _numbers(index: SentenceIndex) -> tuple[Sequence[int], Sequence[int]]:
    """SequenceBounds and documents as they give Python's own numbers, in which planning is quicker."""
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
    """The sentence before which `target` tokens are reached, counted from `sentence`; at most `end`."""
    return max(sentence + 1, min(end, bisect.bisect_left(bounds, bounds[sentence] + target, sentence)))


def truncated(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """What remains of two segments' lengths when tokens are taken from the longer one until both fit."""
    excess = max(0, first + second - max_tokens)
    from_longer = min(excess, abs(first - second))
    rest = excess - from_longer
    # From equals, the second loses the first token.
    first_loses, second_loses = rest // 2, rest - rest // 2
    if first > second:
        first_loses += from_longer
    else:
        second_loses += from_longer
    return first - first_loses, second - second_loses
