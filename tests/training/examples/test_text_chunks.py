import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Sequence, Value

from regard.training.examples.masking import IGNORED
from regard.training.examples.text_chunks import ChunkCollator, ChunkExamples


def examples_of(number: int, length: int, seed: int = 0) -> ChunkExamples:
    """Examples of a corpus whose ids are the places of its tokens, in documents of 0 to 6 of them."""
    ends = itertools.accumulate(itertools.cycle((3, 0, 6, 1, 5)))
    bounds = [0, *itertools.takewhile(lambda end: end < number, ends), number]
    rows = [list(range(*span)) for span in itertools.pairwise(bounds)]
    features = Features({"ids": Sequence(Value("int32"))})
    return ChunkExamples(Dataset.from_dict({"ids": rows}, features=features), length, seed)


def read(chunks) -> list[list[int]]:
    return [chunks[index].tolist() for index in range(len(chunks))]


# Held out


@pytest.mark.parametrize("length", [2, 3, 5, 7])
def test_held_out_chunks_hold_every_token_once(length):
    for number in range(1, 31):
        chunks = read(examples_of(number, length).in_order())
        lone = number % length == 1
        assert list(itertools.chain(*chunks)) == list(range(number - lone))
        assert all(len(chunk) == length for chunk in chunks[:-1])
        assert all(2 <= len(chunk) <= length for chunk in chunks)


# Training


@pytest.mark.parametrize("length", [2, 3, 5, 7])
def test_training_chunks_are_whole_and_share_no_token(length):
    for number, epoch in itertools.product(range(1, 31), range(5)):
        chunks = read(examples_of(number, length).epoch(epoch))
        assert all(chunk == list(range(chunk[0], chunk[0] + length)) for chunk in chunks)
        tokens = list(itertools.chain(*chunks))
        assert len(set(tokens)) == len(tokens)
        assert set(tokens) <= set(range(number))
        # One behind the other, so that less than a chunk is left out at either end.
        assert sorted(tokens) == list(range(min(tokens, default=0), max(tokens, default=-1) + 1))
        if number >= length:
            assert min(tokens) < length
            assert number - 1 - max(tokens) < length


def test_an_epoch_depends_on_the_seed_and_its_number_alone():
    examples = examples_of(97, 5, seed=3)
    expected = [read(examples.epoch(number)) for number in range(4)]
    np.random.seed(11)  # noqa: NPY002 - the global state
    torch.manual_seed(11)
    again = examples_of(97, 5, seed=3)
    assert [read(again.epoch(number)) for number in (3, 1, 0, 2)] == [expected[number] for number in (3, 1, 0, 2)]
    chunks = again.epoch(2)
    order = np.random.default_rng(0).permutation(len(chunks)).tolist()
    assert [chunks[index].tolist() for index in order] == [expected[2][index] for index in order]


def test_another_seed_or_epoch_has_another_order_and_other_cuts():
    epochs = [examples_of(97, 5, seed).epoch(number) for seed in range(3) for number in range(20)]
    orders = {tuple(epoch.order.tolist()) for epoch in epochs}
    assert len(orders) == len(epochs)
    assert all(epoch.order.tolist() != sorted(epoch.order) for epoch in epochs)
    # Each token is some epoch's first, second and so on of a chunk, and is left out of few.
    for first in (0, 20, 40):
        assert {int(epoch.order.min()) for epoch in epochs[first : first + 20]} == set(range(5))


def test_the_next_token_of_every_token_is_learned_in_some_epoch():
    examples = examples_of(33, 4)
    chunks = itertools.chain.from_iterable(read(examples.epoch(number)) for number in range(40))
    assert {pair for chunk in chunks for pair in itertools.pairwise(chunk)} == set(itertools.pairwise(range(33)))


def test_a_corpus_of_one_chunk_or_less():
    assert [read(examples_of(5, 5).epoch(number)) for number in range(9)] == [[[0, 1, 2, 3, 4]]] * 9
    assert [len(examples_of(4, 5).epoch(number)) for number in range(9)] == [0] * 9
    assert read(examples_of(4, 5).in_order()) == [[0, 1, 2, 3]]
    assert read(examples_of(1, 5).in_order()) == []


@pytest.mark.parametrize("length", [1, 0, -3])
def test_a_length_that_leaves_nothing_to_predict(length):
    with pytest.raises(ValueError, match=rf"^`max_length` \({length}\) must be at least 2: .*$"):
        examples_of(30, length)


@pytest.mark.parametrize("index", [-1, 6, 100])
def test_there_is_no_such_chunk(index):
    chunks = examples_of(30, 5).in_order()
    assert len(chunks) == 6
    with pytest.raises(IndexError, match=f"the epoch has 6 examples and no example {index}"):
        chunks[index]


def test_other_processes_read_the_same_chunks():
    chunks = examples_of(200, 7).epoch(1)
    batches = [list(range(start, start + 4)) for start in range(0, len(chunks), 4)]
    batches[-1] = [index for index in batches[-1] if index < len(chunks)]
    loader = torch.utils.data.DataLoader(chunks, batch_sampler=batches, num_workers=2, collate_fn=ChunkCollator(999))
    found = [row for batch in loader for row in batch["input_ids"].tolist()]
    assert found == read(chunks)


# Batches


def test_chunks_are_padded_and_what_is_padded_is_masked():
    rows = [[4, 9, 0, 8], [7, 5, 6, 0, 3, 0, 2], [0]]
    batch = ChunkCollator(0)([np.array(row, dtype=np.int32) for row in rows])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (3, 7)
    )
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    for number, row in enumerate(rows):
        rest = 7 - len(row)
        assert batch["input_ids"][number].tolist() == row + [0] * rest
        # A token of the text that is also the filler is a token.
        assert batch["attention_mask"][number].tolist() == [1] * len(row) + [0] * rest
        assert batch["labels"][number].tolist() == row + [IGNORED] * rest


def test_chunks_are_padded_with_the_given_token():
    batch = ChunkCollator(13)([np.array([1, 2, 3]), np.array([4, 5])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 13]]


def test_a_batch_is_a_copy_of_the_corpus():
    examples = examples_of(20, 5)
    batch = ChunkCollator(0)([examples.in_order()[1]])
    batch["input_ids"].zero_()
    assert batch["labels"].tolist() == [[5, 6, 7, 8, 9]]
    assert read(examples.in_order())[1] == [5, 6, 7, 8, 9]
