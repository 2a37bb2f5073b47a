"""What holds for the functions that make examples, whatever the lengths and the chances."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.modeling.packing import count_predicted, pack, position_ids_of, select_positions, sequence_bounds
from regard.training.examples.masking import IGNORED, Masking
from regard.training.examples.sentence_pairs import SentenceIndex, plan_pairs, plan_segments, truncated
from regard.training.examples.sentences import split_sentences
from regard.training.examples.seq2seq import batched_by_length, padded
from tests.fuzz.attempts import attempt_in_a_line

seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)
VOCABULARY = 9


@given(data=st.data(), rate=st.floats(0.01, 1), shares=st.tuples(shares, shares), seed=seeds, words=st.booleans())
def test_masking(data, rate, shares, seed, words):
    special = np.array(data.draw(st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY)))
    ids = np.array(data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=20)), dtype=np.int64)
    starts = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), dtype=bool)
    settings = {"mask_share": shares[0], "random_share": shares[1], "whole_words": words}
    masking, _ = attempt_in_a_line(ValueError, Masking, VOCABULARY - 1, special, rate, **settings)
    if masking is None:
        assert special.all() or sum(shares) > 1
        return
    if words and not (~special[ids]).any():
        # There is no word to choose: as of an example of nothing but special tokens.
        return
    shown, labels = masking(ids, starts, np.random.default_rng(seed))
    chosen = labels != IGNORED
    ordinary = ~special[ids]
    assert len(shown) == len(labels) == len(ids)
    assert (labels[chosen] == ids[chosen]).all()
    assert (shown[~chosen] == ids[~chosen]).all()
    assert not (chosen & ~ordinary).any()
    assert chosen.any() == ordinary.any()
    # What stands there instead is the mask or ordinary.
    assert all(token == masking.mask_id or not special[token] for token in shown[chosen])
    if not words:
        assert abs(chosen.sum() - max(1, rate * ordinary.sum()) * ordinary.any()) <= 1
    else:
        numbers = np.cumsum((starts & ordinary) | np.diff(ordinary, prepend=False))
        assert all(chosen[(numbers == number) & ordinary].all() for number in set(numbers[chosen]))


@given(first=st.integers(0, 99), second=st.integers(0, 99), room=st.integers(2, 99))
def test_truncation(first, second, room):
    left = truncated(first, second, room)
    assert sum(left) == min(first + second, room)
    assert 0 <= left[0] <= first
    assert 0 <= left[1] <= second
    # What is cut is cut from the longer one first: neither is left much longer, unless the other was short.
    assert min(left) >= min(first, second, room // 2)


documents = st.lists(st.lists(st.integers(1, 30), max_size=5), min_size=1, max_size=6)
plans = {"longest": st.integers(1, 12), "room": st.integers(2, 24), "seed": seeds, "short": shares}


def index_of(lengths, longest):
    flat = np.array([length for document in lengths for length in document], dtype=np.int64)
    return SentenceIndex(flat, np.array([len(document) for document in lengths]), longest)


@given(lengths=documents, epoch=st.integers(0, 5), **plans)
def test_pairs_of_sentences(lengths, longest, room, seed, short, epoch):
    index = index_of(lengths, longest)
    rows, message = attempt_in_a_line(ValueError, plan_pairs, index, room, seed, epoch, short)
    ends = np.cumsum([sum(document) for document in lengths])
    if rows is None:
        with_text = [document for document in lengths if document]
        several = [document for document in with_text if len(document) > 1 or document[0] > longest]
        assert len(with_text) < 2 or not several, message
        return
    assert (rows == plan_pairs(index, room, seed, epoch, short)).all()
    for start, stop, second_start, second_stop, is_random in rows.tolist():
        assert 0 <= start < stop <= ends[-1]
        assert 0 <= second_start < second_stop <= ends[-1]
        first = np.searchsorted(ends, [start, stop - 1], side="right")
        second = np.searchsorted(ends, [second_start, second_stop - 1], side="right")
        assert first[0] == first[1]
        assert second[0] == second[1]
        assert (first[0] != second[0]) if is_random else (second_start == stop and first[0] == second[0])


@given(lengths=documents, **plans)
def test_segments_hold_every_token_once(lengths, longest, room, seed, short):
    index = index_of(lengths, min(longest, room))
    rows, _ = attempt_in_a_line(ValueError, plan_segments, index, room, seed, 0, short)
    if rows is None:
        assert not any(map(len, lengths))
        return
    assert rows[0, 0] == 0
    assert (rows[1:, 0] == rows[:-1, 1]).all()
    assert rows[-1, 1] == sum(map(sum, lengths))
    assert (rows[:, 1] - rows[:, 0] <= max(room, longest)).all()


@given(lengths=st.lists(st.integers(1, 50), max_size=80), batch_size=st.integers(1, 9), seed=seeds)
def test_batches_hold_each_example_once(lengths, batch_size, seed):
    order = batched_by_length(np.array(lengths, dtype=np.int64), batch_size, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(lengths)))


@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5))
def test_padding(rows):
    stacked = padded([np.array(row, dtype=np.int64) for row in rows], -7)
    assert stacked.shape == (len(rows), max(map(len, rows)))
    for row, found in zip(rows, stacked.tolist(), strict=True):
        assert found == row + [-7] * (len(found) - len(row))


@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4), data=st.data())
def test_packing(mask, data):
    attention_mask = torch.tensor(mask)
    ids = torch.arange(attention_mask.numel()).view(attention_mask.shape)
    given_tensors = {"input_ids": ids, "nothing": None}
    packed, message = attempt_in_a_line(ValueError, pack, given_tensors, attention_mask, *attention_mask.shape)
    if packed is None:
        assert not attention_mask.any(dim=1).all(), message
        return
    tensors, bounds = packed
    tokens = int(attention_mask.sum())
    assert tensors["input_ids"].tolist() == [ids[attention_mask].tolist()]
    assert tensors.keys() == {"input_ids"}
    lengths = bounds.cu_seq_lens_q.diff()
    assert lengths.tolist() == attention_mask.sum(1).tolist()
    assert bounds.max_length_q == int(lengths.max())
    positions = position_ids_of(bounds, tokens).tolist()
    assert positions == [place for length in lengths.tolist() for place in range(length)]
    labels = torch.where(torch.tensor([data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))]), 3, -100)
    parts = labels[0].split(lengths.tolist())
    assert count_predicted(labels, bounds.cu_seq_lens_q).tolist() == [int((part != -100).sum()) for part in parts]
    places = (labels[0] != -100).nonzero().squeeze(1)
    selected, indices = select_positions(places, bounds)
    expected = [*bounds.cu_seq_lens_q[:-1].tolist(), *places.tolist()]
    assert selected.positions[indices].tolist() == expected
    assert selected.positions.tolist() == sorted(expected)
    owners = torch.bucketize(selected.positions, bounds.cu_seq_lens_q[1:], right=True)
    assert selected.bounds.cu_seq_lens_q.diff().tolist() == torch.bincount(owners, minlength=len(lengths)).tolist()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_bounds(lengths):
    bounds = sequence_bounds(torch.tensor(lengths))
    assert bounds.cu_seq_lens_q.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert bounds.max_length_k == max(lengths)


@given(
    text=st.text(
        st.sampled_from("aB .!?\n\t-*1)(。？\u2028\x00\u0301é#'\"") | st.characters(exclude_categories=["Cs"])
    ),
    language=st.sampled_from(["en", "de", "ja", "zh", "xx", "pt-br"]) | st.text(max_size=4),
)
def test_sentences_hold_all_but_white_space(text, language):
    sentences, message = attempt_in_a_line(ValueError, split_sentences, text, language)
    if sentences is None:
        assert "`language`" in message
        return
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == " ".join(sentence.split()) for sentence in sentences)


@pytest.mark.parametrize("length", [3_999, 4_000, 4_001, 9_000])
@given(piece=st.text(st.sampled_from("ab. \n。"), min_size=1, max_size=7))
def test_long_texts_lose_nothing_between_their_windows(length, piece):
    text = piece * (length // len(piece))
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())
