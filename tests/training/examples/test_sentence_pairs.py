import itertools
import random

import numpy as np
import pytest

from regard.training.examples.sentence_pairs import SentenceIndex, plan_pairs, plan_segments, truncated


def index_of(*documents: list[int], longest: int = 1_000) -> SentenceIndex:
    """An index of documents that are given as the lengths of their sentences."""
    lengths = np.array([length for document in documents for length in document], dtype=np.int32)
    return SentenceIndex(lengths, np.array([len(document) for document in documents], dtype=np.int32), longest)


def random_index(seed: int, longest: int) -> SentenceIndex:
    """A corpus of odd shapes: empty documents, single sentences, sentences longer than a whole example."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 1, 2, 3, 10]) for _ in range(12)]
    return index_of([2, 3], *([rng.choice([1, 2, 5, 8, 90]) for _ in range(size)] for size in sizes), longest=longest)


def document_bounds(index: SentenceIndex) -> np.ndarray:
    """Where the documents begin, in tokens, and where the last one ends."""
    return index.bounds[index.documents]


def document_of(index: SentenceIndex, start: int, stop: int) -> int:
    """The document that a span of tokens lies in; it must be whole sentences of one document."""
    bounds = document_bounds(index)
    number = int(np.searchsorted(bounds, start, side="right")) - 1
    assert bounds[number] <= start < stop <= bounds[number + 1]
    assert {start, stop} <= set(index.bounds.tolist())
    return number


# The index


def test_index_counts_tokens_and_documents():
    index = index_of([3, 1], [4], [2, 2, 2])
    assert index.bounds.tolist() == [0, 3, 4, 8, 10, 12, 14]
    assert index.documents.tolist() == [0, 2, 3, 6]
    assert index.num_documents == 3


def test_documents_without_text_are_skipped():
    index = index_of([], [3, 1], [], [], [4, 4], [])
    assert index.num_documents == 2
    assert document_bounds(index).tolist() == [0, 4, 12]
    for epoch in range(20):
        for first, first_stop, second, second_stop, _ in plan_pairs(index, 9, 0, epoch).tolist():
            document_of(index, first, first_stop)
            document_of(index, second, second_stop)


@pytest.mark.parametrize("longest", [1, 3, 7])
def test_long_sentences_are_cut_into_pieces(longest):
    documents = [7, 1], [20], [3, 14, 6]
    whole, cut = index_of(*documents), index_of(*documents, longest=longest)
    lengths = np.diff(cut.bounds)
    assert lengths.max() == longest
    assert lengths.min() >= 1
    # Pieces end where the sentences did, and documents are what they were.
    assert set(whole.bounds) <= set(cut.bounds)
    assert document_bounds(cut).tolist() == document_bounds(whole).tolist() == [0, 8, 28, 51]
    # No more pieces than needed.
    assert len(lengths) == sum(-(-length // longest) for document in documents for length in document)


# Pairs


@pytest.mark.parametrize("max_tokens", [2, 11, 40])
@pytest.mark.parametrize("seed", range(8))
def test_every_pair_is_what_its_label_says(seed, max_tokens):
    index = random_index(seed, longest=max_tokens // 2)
    rows = plan_pairs(index, max_tokens, seed, epoch=3)
    assert set(rows[:, 4].tolist()) == {0, 1}
    for first, first_stop, second, second_stop, is_random in rows.tolist():
        own = document_of(index, first, first_stop)
        other = document_of(index, second, second_stop)
        if is_random:
            assert own != other
        else:
            assert own == other
            assert first_stop == second


@pytest.mark.parametrize("seed", range(8))
def test_no_text_is_lost(seed):
    index = random_index(seed, longest=10)
    begins = np.diff(index.documents) > 1
    for epoch in range(5):
        used = np.zeros(index.bounds[-1], dtype=bool)
        for first, first_stop, second, second_stop, is_random in plan_pairs(index, 20, seed, epoch).tolist():
            used[first:first_stop] = True
            if not is_random:
                used[second:second_stop] = True
        # A document of one sentence has no pair of its own. All others are used in full.
        assert used.tolist() == np.repeat(begins, np.diff(document_bounds(index))).tolist()


def test_half_of_the_pairs_are_random_and_none_of_these_is_true():
    index = index_of([4, 6, 5], [3, 8, 7])
    rows = np.concatenate([plan_pairs(index, 12, seed=1, epoch=epoch) for epoch in range(1_000)])
    assert len(rows) > 2_000
    assert rows[:, 4].mean() == pytest.approx(0.5, abs=0.03)
    boundary = document_bounds(index)[1]
    randoms = rows[rows[:, 4] == 1]
    assert ((randoms[:, 0] < boundary) != (randoms[:, 2] < boundary)).all()
    # Each sentence serves as the start of a random second segment, and each document is paired with the other.
    assert set(randoms[:, 2].tolist()) == {0, 4, 10, 15, 18, 26}


def test_the_random_document_is_any_other_one():
    index = index_of(*[[2, 2]] * 5, [3])
    rows = np.concatenate([plan_pairs(index, 8, seed=0, epoch=epoch) for epoch in range(200)])
    randoms = rows[rows[:, 4] == 1]
    pairs = {(document_of(index, *row[:2]), document_of(index, *row[2:4])) for row in randoms.tolist()}
    assert pairs == {(own, other) for own in range(5) for other in range(6) if own != other}


@pytest.mark.parametrize("documents", [[], [[3, 4, 5]], [[3, 4, 5], []]])
def test_one_document_has_no_other_to_draw_from(documents):
    with pytest.raises(ValueError, match=rf"at least 2 documents, but the corpus has {min(len(documents), 1)}"):
        plan_pairs(index_of(*documents), 20, seed=0, epoch=0)


def test_single_sentences_make_no_pair():
    with pytest.raises(ValueError, match="no document has two sentences"):
        plan_pairs(index_of([3], [4], [5]), 20, seed=0, epoch=0)


def test_a_sentence_longer_than_an_example_makes_pairs_of_its_pieces():
    rows = plan_pairs(index_of([1_000], [3], longest=30), 60, seed=0, epoch=0)
    assert {0, 1} == set(rows[:, 4].tolist())
    assert rows[:, 1].max() > 900


def test_segments_are_gathered_up_to_the_length():
    index = index_of([3] * 40, [5] * 40)
    rows = plan_pairs(index, 20, seed=0, epoch=0, short_seq_prob=0)
    own = rows[(rows[:, 4] == 0) & ~np.isin(rows[:, 3], document_bounds(index))]
    lengths = own[:, 3] - own[:, 0]
    assert len(own) > 5
    # The first number of whole sentences that reaches 20.
    assert set(lengths.tolist()) == {20, 21}
    randoms = rows[(rows[:, 4] == 1) & ~np.isin(rows[:, 3], document_bounds(index))]
    totals = randoms[:, 1] - randoms[:, 0] + randoms[:, 3] - randoms[:, 2]
    assert totals.min() >= 20
    assert totals.max() < 25


def test_the_place_of_the_cut_varies():
    rows = np.concatenate([plan_pairs(index_of([2] * 10, [2] * 10), 20, 0, epoch, 0) for epoch in range(50)])
    follows = rows[(rows[:, 4] == 0) & (rows[:, 3] - rows[:, 0] == 20)]
    assert set((follows[:, 1] - follows[:, 0]).tolist()) == {2, 4, 6, 8, 10, 12, 14, 16, 18}


@pytest.mark.parametrize("plan", [plan_pairs, plan_segments])
def test_shorter_examples_are_as_frequent_as_asked(plan):
    index = index_of(*[[1] * 100] * 300)

    def shorter_documents(short_seq_prob: float) -> float:
        rows = plan(index, 50, 0, 0, short_seq_prob)
        first = [rows[np.searchsorted(rows[:, 0], start)] for start in document_bounds(index)[:-1]]
        # A random second segment may be short because its document ends.
        return np.mean([row[1] - row[0] + row[3] - row[2] < 50 for row in first if not row[4]])

    assert shorter_documents(0) == 0
    assert shorter_documents(0.5) == pytest.approx(0.5, abs=0.1)
    assert shorter_documents(1) > 0.9  # the random target can be the full length


@pytest.mark.parametrize("plan", [plan_pairs, plan_segments])
def test_a_plan_is_a_function_of_seed_and_epoch(plan):
    index = random_index(0, longest=10)
    plans = {(seed, epoch): plan(index, 20, seed, epoch, 0.5) for seed in range(3) for epoch in range(3)}
    random.seed(5)
    np.random.default_rng(5).random(7)
    for (seed, epoch), rows in plans.items():
        assert np.array_equal(rows, plan(index, 20, seed, epoch, 0.5))
    for one, other in itertools.combinations(plans.values(), 2):
        assert not np.array_equal(one, other)


# Single segments


@pytest.mark.parametrize("short_seq_prob", [0, 0.3, 1])
@pytest.mark.parametrize("seed", range(4))
def test_segments_hold_every_token_once_and_fit(seed, short_seq_prob):
    index = random_index(seed, longest=20)
    rows = plan_segments(index, 20, seed, 1, short_seq_prob)
    assert rows[0, 0] == 0
    assert rows[-1, 1] == index.bounds[-1]
    assert (rows[1:, 0] == rows[:-1, 1]).all()
    assert (rows[:, 1] - rows[:, 0]).max() <= 20
    assert (rows[:, 2:] == 0).all()
    for start, stop, *_ in rows.tolist():
        document_of(index, start, stop)


def test_segments_take_as_many_sentences_as_fit():
    rows = plan_segments(index_of([5, 5, 5, 5], [9, 2, 10, 1, 1], [12, 12]), 12, 0, 0, short_seq_prob=0)
    assert rows[:, :2].tolist() == [[0, 10], [10, 20], [20, 31], [31, 43], [43, 55], [55, 67]]


def test_one_document_will_do_for_segments():
    assert len(plan_segments(index_of([5]), 12, 0, 0)) == 1


def test_no_segments_without_text():
    with pytest.raises(ValueError, match="no document holds a token"):
        plan_segments(index_of([], []), 12, 0, 0)


# Truncation


def by_single_tokens(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    while first + second > max_tokens:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_truncation_takes_from_the_longer_one():
    for lengths in itertools.product(range(1, 14), range(14), range(2, 12)):
        assert truncated(*lengths) == by_single_tokens(*lengths)
    assert truncated(1_000, 3, 61) == (58, 3)
