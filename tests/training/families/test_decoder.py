"""The decoder's task, its settings and tokenizers, and what goes wrong."""

import collections
import copy
import json
import math

import datasets
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regard.tokenization.byte_level import train_byte_level
from regard.training.examples.masking import IGNORED
from regard.training.families import decoder, text_corpus
from regard.training.families.decoder import DECODER, DecoderObjective, DecoderSettings, continue_texts
from regard.training.families.text_corpus import load_document_split
from tests.support.decoding import TINY_MODEL, chunks_of, figures, make_model


@pytest.fixture(scope="module")
def byte_level(texts):
    """Some words are one token, most are several."""
    return train_byte_level(texts, vocab_size=300, model_max_length=24)


@pytest.fixture
def make_objective(texts, byte_level):
    """A task on the session's texts, its last three documents held out."""

    def make(length: int = 24) -> DecoderObjective:
        parts = (chunks_of(part, byte_level, length) for part in (texts[:-3], texts[-3:]))
        return DecoderObjective(*parts, byte_level.pad_token_id, len(byte_level))

    return make


# The task


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("length", [24, 7])
def test_figures_against_a_count_by_hand(make_objective, texts, byte_level, length, batch_size):
    task, model = make_objective(length), make_model(byte_level)
    sums, metrics = figures(task, model, batch_size)

    counts = collections.Counter(id_ for row in chunks_of(texts[:-3], byte_level).corpus["ids"] for id_ in row)
    most_frequent, _ = counts.most_common(1)[0]
    smoothed = counts.total() + len(byte_level)
    ids = [id_ for row in chunks_of(texts[-3:], byte_level).corpus["ids"] for id_ in row]
    loss = unigram = right = most_frequent_right = predicted = 0.0
    for start in range(0, len(ids), length):
        block = ids[start : start + length]
        with torch.no_grad():
            scores = model(torch.tensor([block])).logits[0].log_softmax(-1)
        for place, label in enumerate(block[1:]):
            predicted += 1
            loss -= scores[place, label].item()
            right += int(scores[place].argmax()) == label
            most_frequent_right += label == most_frequent
            unigram -= math.log((counts[label] + 1) / smoothed)
    assert sums["predicted"] == predicted
    expected = {
        "loss": loss / predicted,
        "perplexity": math.exp(loss / predicted),
        "perplexity_unigram": math.exp(unigram / predicted),
        "token_accuracy": right / predicted,
        "token_accuracy_baseline": most_frequent_right / predicted,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert metrics["token_accuracy_baseline"] > 0
    assert metrics["perplexity_unigram"] < len(byte_level)


def test_a_uniform_model_is_as_perplexed_as_there_are_tokens(make_objective, byte_level):
    model = make_model(byte_level)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, metrics = figures(make_objective(), model)
    assert metrics["perplexity"] == pytest.approx(len(byte_level), rel=1e-5)


def test_a_token_that_was_never_trained_on_has_a_unigram_probability(byte_level):
    task = DecoderObjective(chunks_of(["a" * 50], byte_level), chunks_of(["b" * 50], byte_level), 0, len(byte_level))
    _, metrics = figures(task, make_model(byte_level))
    assert math.isfinite(metrics["perplexity_unigram"])
    assert metrics["perplexity_unigram"] > len(byte_level)


def test_items_of_a_batch(make_objective):
    task = make_objective()
    blocks = [task.epoch(0)[0], task.held_out()[0], task.held_out()[len(task.held_out()) - 1]]
    lengths = [len(block) for block in blocks]
    assert lengths[:2] == [24, 24] != lengths[1:]
    batch = task.collate(blocks)
    assert task.counts(batch) == {"num_items_in_batch": sum(lengths) - 3}
    assert task.tokens(batch) == sum(lengths)


def test_the_loss_is_a_share_of_the_mean_over_the_count(make_objective, byte_level):
    task, model = make_objective(), make_model(byte_level)
    examples = task.held_out()
    blocks = [examples[len(examples) - 1], *(examples[index] for index in range(4))]
    whole = task.collate(blocks)
    count = {name: torch.tensor(number) for name, number in task.counts(whole).items()}
    labels = whole["labels"][:, 1:]
    with torch.no_grad():
        output = task.forward(model, whole, **count)
        expected = nn.functional.cross_entropy(
            output.logits[:, :-1][labels != IGNORED], labels[labels != IGNORED]
        ).item()
        assert output.loss.item() == pytest.approx(expected, rel=1e-5)
        assert task.forward(model, whole).loss.item() == pytest.approx(expected, rel=1e-5)
        parts = [task.forward(model, task.collate(part), **count).loss.item() for part in (blocks[:2], blocks[2:])]
    assert sum(parts) == pytest.approx(expected, rel=1e-5)


def test_which_blocks_are_trained_on_and_which_are_held_out(make_objective, texts, byte_level):
    task = make_objective()
    held_out = [task.held_out()[index].tolist() for index in range(len(task.held_out()))]
    expected = chunks_of(texts[-3:], byte_level).in_order()
    assert held_out == [expected[index].tolist() for index in range(len(expected))]
    trained, expected = task.epoch(3), chunks_of(texts[:-3], byte_level).epoch(3)
    assert [block.tolist() for block in map(trained.__getitem__, range(len(trained)))] == [
        expected[index].tolist() for index in range(len(expected))
    ]


# Settings


def test_the_configuration_has_the_ids_of_the_tokenizer(byte_level):
    other = copy.deepcopy(byte_level)
    other.pad_token, other.bos_token, other.eos_token = "a", "b", "c"
    config = DECODER.make_config(DecoderSettings(vocab_size=999), other)
    ids = [config.pad_token_id, config.bos_token_id, config.eos_token_id]
    assert ids == other.convert_tokens_to_ids(["a", "b", "c"])
    assert config.vocab_size == len(other) == 300
    other.bos_token = None
    assert DECODER.make_config(DecoderSettings(), other).bos_token_id is None
    assert DECODER.make_config(DecoderSettings(vocab_size=999)).vocab_size == 999


@pytest.mark.parametrize(("documents", "expected"), [(3, 3), (9, 5)])
@pytest.mark.parametrize("length", [2, 3, 8, 24])
def test_continuations_fit_the_positions(byte_level, texts, length, documents, expected):
    model = make_model(byte_level, max_position_embeddings=length)
    rows = datasets.Dataset.from_dict({"text": [*texts[:documents]]})
    settings = DecoderSettings(max_length=length, config={"max_position_embeddings": length})
    examples = continue_texts(model, byte_level, rows, settings)
    assert len(examples) == expected
    assert continue_texts(model, byte_level, rows, settings) == examples
    other = DecoderSettings(max_length=length, config={"max_position_embeddings": length}, seed=1)
    assert continue_texts(model, byte_level, rows, other) != examples


def test_a_prompt_leaves_out_the_end_of_a_short_document(byte_level):
    model = make_model(byte_level)
    rows = datasets.Dataset.from_dict({"text": ["Hm"]})
    prompts = []
    whole = model.generate
    model.generate = lambda ids, **options: prompts.append(ids[0].tolist()) or whole(ids, **options)
    (example,) = continue_texts(model, byte_level, rows, DecoderSettings(max_length=24))
    assert example["prompt"] == "Hm"
    assert prompts == [byte_level("Hm")["input_ids"]]


# Tokenizers


def test_a_tokenizer_is_trained_as_asked(texts):
    settings = DecoderSettings(vocab_size=290, config={"max_position_embeddings": 99}, max_length=9)
    tokenizer = DECODER.make_processor(settings, datasets.Dataset.from_dict({"text": texts}))
    assert len(tokenizer) == 290
    assert tokenizer.model_max_length == 99
    text = "Ünïcode  it never saw: 河\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_with_a_named_tokenizer(byte_level, train_decoder, tmp_path, begins):
    taken = PreTrainedTokenizerFast(
        tokenizer_object=byte_level.backend_tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **({"bos_token": "<s>"} if begins else {}),
    )
    taken.save_pretrained(tmp_path / "tokenizer")
    results = train_decoder(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"), vocab_size=5_000, steps=2)
    assert len(results["generated"]) == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.get_vocab() == byte_level.get_vocab()
    assert tokenizer.model_max_length == 24  # the model's limit, not the tokenizer's
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["vocab_size"], config["pad_token_id"], config["eos_token_id"]) == (300, 0, 2)
    assert config["bos_token_id"] == (1 if begins else None)
    # One token a document less.
    _, held_out = load_document_split(DecoderSettings(**results["settings"]))
    texts = [byte_level(row, add_special_tokens=False)["input_ids"] for row in held_out["text"]]
    assert results["data"]["held_out_tokens"] == sum(map(len, texts)) + len(texts) * (1 + begins)


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_tokenizer_without_a_special_token(byte_level, train_decoder, tmp_path, name):
    taken = copy.deepcopy(byte_level)
    setattr(taken, f"{name}_token", None)
    taken.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=f"has no {name} token, which is needed"):
        train_decoder(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    assert not (tmp_path / "run").exists()


# Trained models


def test_a_trained_model_is_evaluated_as_far_as_its_positions_reach(byte_level):
    assert DECODER.settings_of(make_model(byte_level).config) == {"max_length": 24}
    config = make_model(byte_level, max_position_embeddings=2_000).config
    assert DECODER.settings_of(config) == {"max_length": DecoderSettings().max_length}


# What goes wrong


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"batch_size": 5_000}, "fewer than one batch"),
        ({"config": {**TINY_MODEL, "vocab_size": 20}}, r"`vocab_size`"),
        ({"config": {"hidden_size": 30, "num_attention_heads": 4}}, r"`hidden_size` \(30\) must be a multiple of"),
        ({"config": {"hiden_size": 30}}, "has no field `hiden_size`: did you mean `hidden_size`"),
        ({"max_length": 25}, r"`max_length` \(25\) is more than `max_position_embeddings` \(24\)"),
        ({"max_length": 1}, r"`max_length` \(1\) must be at least 2"),
        ({"accumulation": 5}, r"`batch_size` \(12\) must be a multiple of 5"),
        ({"max_documents": 1}, "too few to hold out"),
        ({"max_documents": 0}, r"`max_documents` \(0\) must be at least 1"),
        ({"vocab_size": 100}, r"`vocab_size` \(100\) must be at least 260"),
        ({"size": "huge"}, r"`size` \('huge'\) must be one of tiny, mini"),
        ({"dropout": 1.0}, r"`dropout` \(1.0\) must be at least 0 and less than 1"),
        ({"dropout": -0.1}, r"`dropout` \(-0.1\) must be at least 0 and less than 1"),
        ({"next_sentence": True}, "there is no setting `next_sentence`"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(train_decoder, tmp_path, given, complaint):
    with pytest.raises(ValueError, match=complaint) as found:
        train_decoder(tmp_path / "run", **given)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_length": 25}, "is more than `max_position_embeddings`"),
        ({"config": {"hidden_size": 30, "num_attention_heads": 4}}, "must be a multiple of"),
        ({"config": {"max_position_embeddings": 9}}, "set max_position_embeddings=24 in `config`"),
    ],
)
def test_wrong_sizes_are_refused_before_the_data_is_read(train_decoder, tmp_path, monkeypatch, given, complaint):
    monkeypatch.setattr(text_corpus, "load_documents", lambda *args, **options: pytest.fail("the data is read"))
    monkeypatch.setattr(decoder, "load_document_split", lambda *args, **options: pytest.fail("the data is read"))
    with pytest.raises(ValueError, match=complaint):
        train_decoder(tmp_path / "run", **given)
