import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from regard.training.examples.bert import BertCollator
from regard.training.examples.masking import IGNORED
from regard.training.reading.documents import load_documents
from tests.support.fresh import run_python

ROOT = Path(__file__).parents[3]


def original(example) -> np.ndarray:
    """The ids of an example before it was masked."""
    return np.where(example["labels"] == IGNORED, example["input_ids"], example["labels"])


def segments_of(example, tokenizer) -> list[list[int]]:
    """The ids of each segment; special tokens and segment ids must be where they belong."""
    ids, types = original(example).tolist(), example["token_type_ids"].tolist()
    assert ids[0] == tokenizer.cls_token_id
    assert ids[-1] == tokenizer.sep_token_id
    bounds = [0, *(place for place, id_ in enumerate(ids) if id_ == tokenizer.sep_token_id)]
    segments = [ids[start + 1 : stop] for start, stop in itertools.pairwise(bounds)]
    assert types == [0, *(number for number, segment in enumerate(segments) for _ in range(len(segment) + 1))]
    assert not set(itertools.chain(*segments)) & {tokenizer.cls_token_id, tokenizer.pad_token_id}
    return segments


def rows_of(examples, number: int) -> np.ndarray:
    """What each example of an epoch is made of, in the epoch's order."""
    return examples.plan(number)[examples.epoch(number).order]


def same(one, other) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys())


# What an example is


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("max_length", [5, 16, 64])
def test_a_long_and_a_short_sentence_fit(examples_of, tokenizer, max_length, next_sentence):
    texts = ["river " * 1_000, "a stone fish", "the wall. the roof."]
    examples = examples_of(texts, max_length=max_length, next_sentence=next_sentence)
    for number in range(3):
        epoch = examples.epoch(number)
        for index in range(len(epoch)):
            segments = segments_of(epoch[index], tokenizer)
            assert [len(segment) >= 1 for segment in segments] == [True] * (2 if next_sentence else 1)
            assert len(epoch[index]["input_ids"]) <= max_length
        # The long one fills examples.
        assert max(len(epoch[index]["input_ids"]) for index in range(len(epoch))) == max_length


def test_text_without_full_stops_makes_pairs(examples_of, tokenizer):
    # Each document is one sentence of 40 tokens, which would fit into an example.
    epoch = examples_of(["a " * 40] * 3, max_length=64, short_seq_prob=0).epoch(0)
    assert len(epoch) >= 3
    assert all(len(segments_of(epoch[index], tokenizer)) == 2 for index in range(len(epoch)))


def test_segments_are_what_the_plan_says(examples_of, corpus_of, tokenizer, texts):
    flat = [id_ for ids in corpus_of(texts)["ids"] for id_ in ids]
    examples = examples_of(texts, max_length=40)
    epoch = examples.epoch(1)
    cut = []
    for index, (first, first_stop, second, second_stop, is_random) in enumerate(rows_of(examples, 1).tolist()):
        example = epoch[index]
        assert example["next_sentence_label"] == is_random
        planned = flat[first:first_stop], flat[second:second_stop]
        for made, whole in zip(segments_of(example, tokenizer), planned, strict=True):
            starts = range(len(whole) - len(made) + 1)
            assert any(whole[start : start + len(made)] == made for start in starts)
            cut.append(len(whole) - len(made))
        total = sum(map(len, planned)) + 3
        assert len(example["input_ids"]) == min(40, total)
    assert any(cut)
    assert not all(cut)


def test_text_is_cut_from_both_ends(examples_of, tokenizer):
    words = [f"{a}{b}" for a in "abcdefghijklmnop" for b in "qrstuvwxyz"]
    numbered = type(tokenizer)(vocab={piece: id_ for id_, piece in enumerate([*tokenizer.all_special_tokens, *words])})
    # A sentence of 31 words is longer than the half of an example, but no longer than a piece.
    text = " ".join(words[:31])
    examples = examples_of([f"{text}. {text}."] * 2, numbered, max_length=42, short_seq_prob=0)
    fronts, backs = set(), set()
    for number in range(40):
        epoch = examples.epoch(number)
        for index in range(len(epoch)):
            for segment in segments_of(epoch[index], numbered):
                pieces = [piece for piece in numbered.convert_ids_to_tokens(segment) if piece in words]
                if len(pieces) > 1:
                    fronts.add(pieces[0])
                    backs.add(pieces[-1])
    assert len(fronts) > 5
    assert len(backs) > 5


def test_half_of_the_labels_are_random(examples_of):
    documents = load_documents("python-docs", max_documents=150)
    examples = examples_of(documents["text"], max_length=128)
    labels = np.concatenate([examples.plan(number)[:, 4] for number in range(3)])
    assert len(labels) > 1_000
    assert labels.mean() == pytest.approx(0.5, abs=0.05)
    epoch = examples.epoch(0)
    assert examples.random_share(0) == examples.plan(0)[:, 4].mean()
    assert examples.random_share(0) == np.mean([epoch[index]["next_sentence_label"] for index in range(len(epoch))])


def test_names_of_special_tokens_in_a_text_are_text(examples_of, texts):
    from regard.tokenization.wordpiece import train_wordpiece

    tempting = [text.replace(".", " [SEP] [MASK] [CLS] [PAD].") for text in texts]
    tokenizer = train_wordpiece(tempting, vocab_size=120)
    for next_sentence in (True, False):
        epoch = examples_of(tempting, tokenizer, masked={"rate": 1.0}, next_sentence=next_sentence).epoch(0)
        for index in range(len(epoch)):
            segments = segments_of(epoch[index], tokenizer)
            assert len(segments) == 1 + next_sentence
            # What isn't predicted at a rate of 1 is special.
            assert (epoch[index]["labels"] == IGNORED).sum() == 2 + next_sentence


@pytest.mark.parametrize("kind", ["tokenizer", "byte_tokenizer"])
def test_words_are_masked_whole(examples_of, texts, kind, request):
    tokenizer = request.getfixturevalue(kind)
    epoch = examples_of(texts, tokenizer, masked={"whole_words": True, "rate": 0.3}).epoch(0)
    longest = 0
    for index in range(len(epoch)):
        example = epoch[index]
        pieces = tokenizer.convert_ids_to_tokens(original(example))
        chosen = example["labels"] != IGNORED
        word: list[bool] = []
        follows_special = True
        for piece, is_chosen in zip(pieces, chosen.tolist(), strict=True):
            special = piece in tokenizer.all_special_tokens
            starts = not piece.startswith("##") if kind == "tokenizer" else piece.startswith(("Ġ", "."))
            if starts or special or follows_special:
                word = []
            word.append(is_chosen)
            assert len(set(word)) == 1
            longest = max(longest, len(word) * is_chosen)
            follows_special = special
    assert longest > 2


def test_single_pieces_are_masked_without_whole_words(examples_of, texts, tokenizer):
    epoch = examples_of(texts).epoch(0)
    split = 0
    for index in range(len(epoch)):
        chosen = epoch[index]["labels"] != IGNORED
        pieces = tokenizer.convert_ids_to_tokens(original(epoch[index]))
        continues = [piece.startswith("##") for piece in pieces[1:]]
        split += sum(np.diff(chosen.astype(int)).astype(bool) & continues)
    assert split > 20


# A function of the seed, the epoch and the index


@pytest.fixture
def examples(examples_of, texts):
    return examples_of(texts, seed=3)


def test_nothing_drawn_before_changes_an_example(examples, examples_of, texts):
    epoch = examples.epoch(2)
    forward = [epoch[index] for index in range(len(epoch))]
    np.random.default_rng(0).random(3)
    torch.rand(3)
    examples.epoch(0)[1], examples.epoch(3)[1]
    again = examples_of(texts, seed=3).epoch(2)
    backward = [again[index] for index in reversed(range(len(again)))][::-1]
    assert all(itertools.starmap(same, zip(forward, backward, strict=True)))


def test_another_seed_epoch_or_index_is_another_example(examples_of, texts):
    masked = {}
    for seed, number in itertools.product(range(2), range(2)):
        epoch = examples_of(texts, seed=seed).epoch(number)
        masked |= {(seed, number, index): epoch[index] for index in range(len(epoch))}
    assert not any(same(one, other) for one, other in itertools.combinations(masked.values(), 2))


def test_masks_of_the_same_text_differ(examples_of):
    # One pair alone, so that only the masks can differ.
    examples = examples_of(["A river stone. A bank.", "A wall."], next_sentence=False, short_seq_prob=0, max_length=40)
    rows = {tuple(row) for number in range(6) for row in rows_of(examples, number).tolist()}
    assert len(rows) == 2
    for document in range(2):
        seen = set()
        for number in range(6):
            epoch = examples.epoch(number)
            index = sorted(range(2), key=lambda index: rows_of(examples, number)[index, 0])[document]
            seen.add(tuple(epoch[index]["labels"].tolist()))
        assert len(seen) > 2


def test_masks_of_equal_examples_differ(examples_of):
    epoch = examples_of(["A river stone. A bank."] * 8, next_sentence=False, short_seq_prob=0).epoch(0)
    assert len({tuple(original(epoch[index]).tolist()) for index in range(8)}) == 1
    assert len({tuple(epoch[index]["labels"].tolist()) for index in range(8)}) > 3


def test_the_order_of_an_epoch_is_shuffled_and_complete(examples):
    orders = [rows_of(examples, number)[:, 0].tolist() for number in range(3)]
    for order in orders:
        assert order != sorted(order)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_make_no_difference(examples, workers):
    epoch = examples.epoch(1)
    expected = [epoch[index] for index in range(len(epoch))]
    loader = DataLoader(epoch, batch_size=5, collate_fn=list, num_workers=workers)
    for _ in range(2):
        made = list(itertools.chain(*loader))
        assert all(itertools.starmap(same, zip(made, expected, strict=True)))


PROBE = """
import json, sys
import numpy as np
from transformers import BertTokenizer
from regard.training.examples.bert import BertExamples
from regard.training.examples.tokenized import tokenize_documents
from regard.training.examples.masking import Masking
from regard.training.reading.documents import load_documents

tokenizer = BertTokenizer.from_pretrained(sys.argv[1])
corpus = tokenize_documents(load_documents(sys.argv[2]), tokenizer)
epoch = BertExamples(corpus, tokenizer, Masking.from_tokenizer(tokenizer), max_length=32, seed=3).epoch(1)
made = [{name: np.asarray(value).tolist() for name, value in epoch[index].items()} for index in range(len(epoch))]
print(json.dumps(made))
"""


def test_another_process_makes_the_same_examples(examples, tokenizer, corpus_folder, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    other = run_python(PROBE, ROOT, str(tmp_path), corpus_folder)
    assert other.returncode == 0, other.stderr
    epoch = examples.epoch(1)
    made = json.loads(other.stdout.splitlines()[-1])
    assert all(same(epoch[index], example) for index, example in enumerate(made))
    assert len(made) == len(epoch)


def test_an_index_out_of_the_epoch(examples):
    epoch = examples.epoch(0)
    for index in (-1, len(epoch)):
        with pytest.raises(IndexError, match=f"the epoch has {len(epoch)} examples and no example {index}"):
            epoch[index]


# Settings


def test_examples_without_next_sentences_use_every_token_once(examples_of, corpus_of, texts, tokenizer):
    epoch = examples_of(texts, next_sentence=False).epoch(4)
    made = [segments_of(epoch[index], tokenizer)[0] for index in range(len(epoch))]
    expected = itertools.chain(*corpus_of(texts)["ids"])
    assert sorted(itertools.chain(*made)) == sorted(expected)
    assert {epoch[index]["next_sentence_label"] for index in range(len(epoch))} == {0}


@pytest.mark.parametrize(("next_sentence", "least"), [(True, 5), (False, 4)])
def test_a_length_without_room(examples_of, texts, next_sentence, least):
    with pytest.raises(ValueError, match=rf"`max_length` \({least - 1}\) must be at least {least}"):
        examples_of(texts, max_length=least - 1, next_sentence=next_sentence)
    epoch = examples_of(texts, max_length=least, next_sentence=next_sentence).epoch(0)
    assert len(epoch[0]["input_ids"]) <= least


def test_a_corpus_of_one_document(examples_of, texts):
    with pytest.raises(ValueError, match="at least 2 documents, but the corpus has 1"):
        examples_of(texts[:1]).epoch(0)
    assert len(examples_of(texts[:1], next_sentence=False).epoch(0)) > 0


def test_a_corpus_without_a_token(examples_of):
    with pytest.raises(ValueError, match="at least 2 documents, but the corpus has 0"):
        examples_of(["\x00", "\x07"]).epoch(0)
    with pytest.raises(ValueError, match="no document holds a token"):
        examples_of(["\x00", "\x07"], next_sentence=False).epoch(0)


# Batches


def make_example(ids: list[int], predicted: list[int], label: int) -> dict:
    """An example in which some places are predicted; the ids there are one more than what is shown."""
    labels = np.full(len(ids), IGNORED)
    labels[predicted] = np.array(ids)[predicted] + 1
    return {
        "input_ids": np.array(ids),
        "token_type_ids": np.arange(len(ids)) // 2,
        "labels": labels,
        "next_sentence_label": label,
    }


def test_a_batch_is_one_row_of_examples():
    examples = [make_example([7, 8], [1], 0), make_example([4, 5, 6, 9, 3], [0, 3], 1), make_example([2], [], 1)]
    batch = BertCollator()(examples)
    assert batch["input_ids"].tolist() == [[7, 8, 4, 5, 6, 9, 3, 2]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 2, 0]]
    assert batch["labels"].tolist() == [[-100, 9, 5, -100, -100, 10, -100, -100]]
    assert batch["predicted_positions"].tolist() == [1, 2, 5]
    assert batch["next_sentence_label"].tolist() == [0, 1, 1]
    tensors = ("input_ids", "token_type_ids", "labels", "predicted_positions", "next_sentence_label")
    assert {batch[name].dtype for name in tensors} == {torch.int64}


def test_a_batch_tells_its_bounds_as_transformers_does():
    examples = [make_example(list(range(length)), [], 0) for length in (2, 5, 1, 4)]
    batch = BertCollator()(examples)
    ids = [{"input_ids": example["input_ids"]} for example in examples]
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(ids)
    names = {name for name in expected if name not in ("input_ids", "labels")}
    assert names == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    for name in names:
        value = expected[name]
        assert type(batch[name]) is type(value)
        torch.testing.assert_close(batch[name], value)
    assert batch["input_ids"].equal(expected["input_ids"])


def test_a_batch_with_nothing_to_predict():
    batch = BertCollator()([make_example([3, 4], [], 0)])
    assert batch["predicted_positions"].tolist() == []
    assert batch["predicted_positions"].dtype == torch.int64


def test_a_batch_without_next_sentences():
    examples = [make_example([7, 8], [0], 0)]
    batch = BertCollator(next_sentence=False)(examples)
    assert batch.keys() == BertCollator()(examples).keys() - {"next_sentence_label"}


def test_a_batch_holds_its_examples_and_no_padding(examples_of, texts, tokenizer):
    epoch = examples_of(texts).epoch(0)
    examples = [epoch[index] for index in range(len(epoch))]
    batch = BertCollator()(examples)
    assert len({len(example["input_ids"]) for example in examples}) > 3
    assert (batch["input_ids"] != tokenizer.pad_token_id).all()
    bounds = batch["cu_seq_lens_q"].tolist()
    assert batch["input_ids"].shape == (1, bounds[-1])
    for example, (start, stop) in zip(examples, itertools.pairwise(bounds), strict=True):
        for name in ("input_ids", "token_type_ids", "labels"):
            assert batch[name][0, start:stop].tolist() == example[name].tolist()
    assert batch["next_sentence_label"].tolist() == [example["next_sentence_label"] for example in examples]
    predicted = torch.zeros(bounds[-1], dtype=torch.bool)
    predicted[batch["predicted_positions"]] = True
    assert predicted.equal(batch["labels"][0] != IGNORED)
