"""Pairs as ids, in batches of like lengths, padded."""

import logging

import datasets
import numpy as np
import pytest
import torch
from datasets import Features, Value

from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.training.examples import seq2seq as pair_data
from regard.training.examples.masking import IGNORED
from regard.training.examples.seq2seq import PairCollator, PairExamples, batched_by_length, tokenize_pairs
from regard.training.reading.cache import write_dataset

PAIRS = [("river bank", "banque"), ("a", "un deux trois"), ("the wide stone", "pierre"), ("fish, fish", "poisson é")]


def dataset_of(pairs: list[tuple[str, str]]) -> datasets.Dataset:
    """Pairs in the cache, as those of every source are."""
    return write_dataset(
        lambda: (dict(zip(("source", "target"), pair, strict=True)) for pair in pairs),
        Features({"source": Value("string"), "target": Value("string")}),
        key=("test", pairs),
    )


@pytest.fixture(scope="module")
def texts_of_pairs() -> list[str]:
    return [text for pair in PAIRS for text in pair] * 3 + ["</s><pad><unk>"]


@pytest.fixture(scope="module", params=["characters", "pieces", "both ends"])
def tokenizer(request, texts_of_pairs):
    """Tokenizers that put the end behind, the beginning before, and both around a text."""
    if request.param == "characters":
        return train_characters(texts_of_pairs)
    pieces = train_byte_level(texts_of_pairs, vocab_size=280)
    if request.param == "both ends":
        from tokenizers.processors import TemplateProcessing

        special = [(name, pieces.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
        pieces.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return pieces


# Tokenising


def test_ids_are_those_of_the_tokenizer(tokenizer):
    # What an earlier call had the tokenizer cut and pad is nothing to it.
    tokenizer(["river", "a"], padding="max_length", truncation=True, max_length=3)
    rows = tokenize_pairs(dataset_of(PAIRS), tokenizer, 99)
    for row, (source, target) in zip(rows, PAIRS, strict=True):
        assert row["source"] == tokenizer(source)["input_ids"]
        assert row["target"] == [*tokenizer(target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert tokenizer.decode(row["source"], skip_special_tokens=True) == source
        assert tokenizer.decode(row["target"], skip_special_tokens=True) == target


def test_names_of_special_tokens_are_text(tokenizer):
    source, target = "a</s>b<pad>", "<s></s><unk>"
    (row,) = tokenize_pairs(dataset_of([(source, target)]), tokenizer, 99)
    assert row["source"] == tokenizer(source, split_special_tokens=True)["input_ids"]
    assert row["source"] != tokenizer(source)["input_ids"]
    assert row["target"].count(tokenizer.eos_token_id) == 1
    plain = set(row["target"][:-1])
    assert plain.isdisjoint({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id})


def test_pairs_that_are_too_long_are_left_out_and_counted(texts_of_pairs, caplog):
    tokenizer = train_characters(texts_of_pairs)
    # With the end, 5 and 6 tokens each.
    fits, long = "fish", "stone"
    pairs = [(fits, fits), (long, fits), (fits, long), (fits, fits), (long, long)]
    rows = tokenize_pairs(dataset_of(pairs), tokenizer, 5)
    assert [(len(row["source"]), len(row["target"])) for row in rows] == [(5, 5)] * 2
    assert [record.getMessage() for record in caplog.records if record.name == "regard.training"] == [
        "3 of 5 pairs are longer than `max_length` (5) and left out."
    ]
    caplog.clear()
    assert len(tokenize_pairs(dataset_of(pairs), tokenizer, 6)) == 5
    assert not caplog.messages


def test_all_pairs_are_too_long(texts_of_pairs):
    with pytest.raises(ValueError, match=r"all 4 pairs are longer than `max_length` \(2\)"):
        tokenize_pairs(dataset_of(PAIRS), train_characters(texts_of_pairs), 2)


@pytest.fixture
def tokenised(monkeypatch) -> list[int]:
    """How many texts each batch held that was tokenised."""
    counts = []
    whole = pair_data.plain_backend

    class Counting:
        def __init__(self, backend) -> None:
            self.backend = backend

        def encode_batch(self, texts, **options):
            counts.append(len(texts))
            return self.backend.encode_batch(texts, **options)

        def to_str(self) -> str:
            return self.backend.to_str()

    monkeypatch.setattr(pair_data, "plain_backend", lambda tokenizer: Counting(whole(tokenizer)))
    return counts


def test_what_is_tokenised_is_kept(tmp_path, monkeypatch, tokenised, texts_of_pairs):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    tokenizer = train_characters(texts_of_pairs)
    first = tokenize_pairs(dataset_of(PAIRS), tokenizer, 30)
    assert tokenised == [4, 4]
    # Another object that is the same in all that matters.
    again = tokenize_pairs(dataset_of(list(PAIRS)), train_characters(texts_of_pairs), 30)
    assert tokenised == [4, 4]
    assert again[:] == first[:]
    other_end = train_characters(texts_of_pairs)
    other_end.eos_token = "<unk>"
    for changed in (
        (dataset_of(PAIRS[:3]), tokenizer, 30),
        (dataset_of(PAIRS), train_characters(texts_of_pairs[:8]), 30),
        (dataset_of(PAIRS), tokenizer, 29),
        (dataset_of(PAIRS), other_end, 30),
    ):
        tokenised.clear()
        rows = tokenize_pairs(*changed)
        assert len(tokenised) == 2
        assert {row[-1] for row in rows["target"]} == {changed[1].eos_token_id}


# The order


def padding(lengths: np.ndarray, order: np.ndarray, batch_size: int) -> int:
    batches = [lengths[order[start : start + batch_size]] for start in range(0, len(order), batch_size)]
    return sum(int((batch.max() - batch).sum()) for batch in batches)


def draw_lengths(number: int) -> np.ndarray:
    return np.random.default_rng(5).integers(3, 90, number)


@pytest.mark.parametrize("batch_size", [1, 7, 16])
@pytest.mark.parametrize("number", [1, 6, 7, 100, 1_003])
def test_an_order_holds_each_example_once(number, batch_size):
    order = batched_by_length(draw_lengths(number), batch_size, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(number))


def test_batches_are_of_like_lengths_and_come_by_chance():
    lengths, batch_size = draw_lengths(2_000), 8
    order = batched_by_length(lengths, batch_size, np.random.default_rng(0))
    by_chance = np.random.default_rng(1).permutation(len(lengths))
    assert padding(lengths, order, batch_size) < padding(lengths, by_chance, batch_size) / 8
    means = lengths[order].reshape(-1, batch_size).mean(axis=1)
    # Neither the longest first nor in pools from short to long.
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2
    assert (np.diff(means) > 0).mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("number", [13, 21, 150])
def test_those_that_are_left_over_are_any(number):
    """An epoch is whole batches, so nothing may keep an example, such as the longest, out of all epochs."""
    lengths, batch_size, whole = np.arange(number), 8, number // 8 * 8
    trained = set()
    for seed in range(60):
        trained |= set(batched_by_length(lengths, batch_size, np.random.default_rng(seed))[:whole].tolist())
    assert trained == set(range(number))


@pytest.fixture(scope="module")
def examples(texts_of_pairs) -> PairExamples:
    pairs = [(source * (1 + number % 5), target * (1 + number % 3)) for number in range(8) for source, target in PAIRS]
    return PairExamples(tokenize_pairs(dataset_of(pairs), train_characters(texts_of_pairs), 99), 4, seed=3)


def test_an_epoch_is_a_function_of_seed_and_number(examples):
    orders = {
        (seed, number): PairExamples(examples.pairs, 4, seed).epoch(number).order
        for seed in range(3)
        for number in range(3)
    }
    np.random.default_rng(8).random(5)
    for (seed, number), order in orders.items():
        again = PairExamples(examples.pairs, 4, seed)
        again.epoch(7)
        assert np.array_equal(again.epoch(number).order, order)
    assert len({tuple(order) for order in orders.values()}) == 9


def test_an_epoch_reads_the_rows_in_its_order(examples):
    epoch, in_order = examples.epoch(1), examples.in_order()
    assert len(epoch) == len(in_order) == len(examples.pairs) == 32
    assert examples.lengths.tolist() == [len(row["source"]) + len(row["target"]) for row in examples.pairs]
    for index, row in enumerate(epoch.order.tolist()):
        for found in (epoch[index], in_order[row]):
            assert found["input_ids"].tolist() == examples.pairs[row]["source"]
            assert found["labels"].tolist() == examples.pairs[row]["target"]
    assert sorted(epoch.order.tolist()) == list(range(32))


@pytest.mark.parametrize("index", [-1, 32])
def test_examples_that_are_not_there(examples, index):
    with pytest.raises(IndexError, match=f"the epoch has 32 examples and no example {index}"):
        examples.in_order()[index]


def test_epochs_have_little_padding(texts_of_pairs):
    pairs = [("a" * length, "a" * length) for length in draw_lengths(200).tolist()]
    examples = PairExamples(tokenize_pairs(dataset_of(pairs), train_characters(texts_of_pairs), 99), 4)
    fillers = []
    for epoch in (examples.epoch(0), examples.in_order()):
        batches = [PairCollator(0)([epoch[index] for index in range(start, start + 4)]) for start in range(0, 200, 4)]
        fillers.append(sum(int((batch["attention_mask"] == 0).sum()) for batch in batches))
    assert fillers[0] < fillers[1] / 8


# Batches


def test_a_batch_is_padded_and_masked(examples):
    own = [examples.in_order()[index] for index in (1, 6, 2)]
    batch = PairCollator(pad_id=7)(own)
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    for name, filler in (("input_ids", 7), ("labels", IGNORED)):
        longest = max(len(example[name]) for example in own)
        assert batch[name].shape == (3, longest)
        for row, example in zip(batch[name].tolist(), own, strict=True):
            assert row == [*example[name].tolist(), *[filler] * (longest - len(example[name]))]
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(example["input_ids"]) for example in own]
    assert (batch["attention_mask"].diff(dim=1) <= 0).all()


def test_a_padding_id_in_a_text_is_not_masked():
    batch = PairCollator(pad_id=0)([{"input_ids": np.array([0, 0, 2]), "labels": np.array([0, 2])}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1]]
    assert batch["labels"].tolist() == [[0, 2]]


def test_tokenising_is_quiet_when_all_fits(tokenizer, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        tokenize_pairs(dataset_of(PAIRS), tokenizer, 99)
    assert not [record for record in caplog.records if record.name.startswith("regard")]
