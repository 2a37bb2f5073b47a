import collections
import copy
import json
import logging
import math
import random

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

from regard.modeling.decoder import RegardDecoderForCausalLM
from regard.tokenization.byte_level import train_byte_level
from regard.training import decoder, text
from regard.training.blocks import BlockExamples
from regard.training.corpus import tokenize_texts
from regard.training.decoder import DECODER, DecoderSettings, DecoderTask, continue_texts
from regard.training.family import train
from regard.training.loop import Loop
from regard.training.masking import IGNORED
from regard.training.text import load_split

TINY_MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
TINY = {
    "vocab_size": 300,
    "config": TINY_MODEL,
    "max_length": 24,
    "batch_size": 12,
    "validation": "0.25",
    "log_with": ["none"],
}


@pytest.fixture(scope="module")
def byte_level(texts):
    """Some words are one token, most are several."""
    return train_byte_level(texts, vocab_size=300, model_max_length=24)


def blocks_of(texts: list[str], tokenizer, length: int = 24) -> BlockExamples:
    return BlockExamples(tokenize_texts(datasets.Dataset.from_dict({"text": texts}), tokenizer), length)


@pytest.fixture
def make_task(texts, byte_level):
    """A task on the session's texts, its last three documents held out."""

    def make(length: int = 24) -> DecoderTask:
        parts = (blocks_of(part, byte_level, length) for part in (texts[:-3], texts[-3:]))
        return DecoderTask(*parts, byte_level.pad_token_id, len(byte_level))

    return make


def make_model(tokenizer, **fields) -> RegardDecoderForCausalLM:
    settings = DecoderSettings(config={**TINY_MODEL, "num_hidden_layers": 2, **fields}, dropout=0.0, max_length=2)
    return RegardDecoderForCausalLM(settings.make_config(tokenizer)).eval()


@torch.no_grad()
def figures(task: DecoderTask, model: nn.Module, batch_size: int = 4) -> tuple[dict, dict]:
    """The sums and the metrics of the held-out blocks, in batches of some size."""
    examples = task.held_out()
    sums: collections.Counter = collections.Counter()
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        batch = task.collate([examples[index] for index in range(start, stop)])
        sums.update({name: float(value) for name, value in task.sums(task.forward(model, batch), batch).items()})
    return sums, task.metrics(sums)


# The task


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("length", [24, 7])
def test_figures_against_a_count_by_hand(make_task, texts, byte_level, length, batch_size):
    task, model = make_task(length), make_model(byte_level)
    sums, metrics = figures(task, model, batch_size)

    counts = collections.Counter(id_ for row in blocks_of(texts[:-3], byte_level).corpus["ids"] for id_ in row)
    most_frequent, _ = counts.most_common(1)[0]
    smoothed = counts.total() + len(byte_level)
    ids = [id_ for row in blocks_of(texts[-3:], byte_level).corpus["ids"] for id_ in row]
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


def test_a_uniform_model_is_as_perplexed_as_there_are_tokens(make_task, byte_level):
    model = make_model(byte_level)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, metrics = figures(make_task(), model)
    assert metrics["perplexity"] == pytest.approx(len(byte_level), rel=1e-5)


def test_a_token_that_was_never_trained_on_has_a_unigram_probability(byte_level):
    task = DecoderTask(blocks_of(["a" * 50], byte_level), blocks_of(["b" * 50], byte_level), 0, len(byte_level))
    _, metrics = figures(task, make_model(byte_level))
    assert math.isfinite(metrics["perplexity_unigram"])
    assert metrics["perplexity_unigram"] > len(byte_level)


def test_items_of_a_batch(make_task):
    task = make_task()
    blocks = [task.epoch(0)[0], task.held_out()[0], task.held_out()[len(task.held_out()) - 1]]
    lengths = [len(block) for block in blocks]
    assert lengths[:2] == [24, 24] != lengths[1:]
    batch = task.collate(blocks)
    assert task.counts(batch) == {"num_items_in_batch": sum(lengths) - 3}
    assert task.tokens(batch) == sum(lengths)


def test_the_loss_is_a_share_of_the_mean_over_the_count(make_task, byte_level):
    task, model = make_task(), make_model(byte_level)
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


def test_which_blocks_are_trained_on_and_which_are_held_out(make_task, texts, byte_level):
    task = make_task()
    held_out = [task.held_out()[index].tolist() for index in range(len(task.held_out()))]
    expected = blocks_of(texts[-3:], byte_level).in_order()
    assert held_out == [expected[index].tolist() for index in range(len(expected))]
    trained, expected = task.epoch(3), blocks_of(texts[:-3], byte_level).epoch(3)
    assert [block.tolist() for block in map(trained.__getitem__, range(len(trained)))] == [
        expected[index].tolist() for index in range(len(expected))
    ]


# Settings


def test_the_configuration_has_the_ids_of_the_tokenizer(byte_level):
    other = copy.deepcopy(byte_level)
    other.pad_token, other.bos_token, other.eos_token = "a", "b", "c"
    config = DecoderSettings(vocab_size=999).make_config(other)
    ids = [config.pad_token_id, config.bos_token_id, config.eos_token_id]
    assert ids == other.convert_tokens_to_ids(["a", "b", "c"])
    assert config.vocab_size == len(other) == 300
    other.bos_token = None
    assert DecoderSettings().make_config(other).bos_token_id is None
    assert DecoderSettings(vocab_size=999).make_config().vocab_size == 999


# Runs


@pytest.fixture(scope="module")
def train_decoder(corpus_folder):
    """Runs a tiny training in a folder; what is given goes before the tiny settings."""

    def run(folder, resume: bool = False, **given) -> dict:
        AcceleratorState._reset_state(reset_partial_state=True)
        return train(DECODER, folder, {**TINY, "data": [corpus_folder], **given}, resume=resume)

    return run


@pytest.fixture(scope="module")
def ended(train_decoder, tmp_path_factory):
    """A run that has ended, and what it came to."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    return folder, train_decoder(folder, steps=6)


def test_what_a_run_tells(ended, corpus_folder):
    folder, results = ended
    assert results == json.loads((folder / "results.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (results["family"], results["architecture"]) == ("decoder", "RegardDecoderForCausalLM")
    assert results["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (results["step"], results["tokens"]) == (6, 6 * 12 * 24)
    parts = load_split(DecoderSettings(**results["settings"]))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    # Each document has a token that begins it and one that ends it.
    tokens = [sum(len(tokenizer(row)["input_ids"]) + 1 for row in part["text"]) for part in parts]
    assert results["data"] == {
        "documents": 9,
        "tokens": tokens[0],
        "held_out_documents": 3,
        "held_out_tokens": tokens[1],
    }
    assert corpus_folder in results["settings"]["data"]


def test_the_figures_are_those_of_the_saved_model(ended):
    folder, results = ended
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    train_part, held_out = load_split(DecoderSettings(**results["settings"]))
    parts = (blocks_of(part["text"], tokenizer) for part in (train_part, held_out))
    _, metrics = figures(DecoderTask(*parts, tokenizer.pad_token_id, len(tokenizer)), model)
    assert results["metrics"] == pytest.approx(metrics, rel=1e-5)


def test_transformers_loads_the_model(ended):
    folder, _ = ended
    model, tokenizer = (
        auto_class.from_pretrained(folder / "model") for auto_class in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert isinstance(model, RegardDecoderForCausalLM)
    generate = pipeline("text-generation", model=str(folder / "model"))
    (made,) = generate("River stone", max_new_tokens=5, do_sample=False)
    ids = model.generate(**tokenizer("River stone", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert made["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert made["generated_text"].startswith("River stone")


def test_the_tokenizer_is_saved_as_the_run_began_with_it(ended):
    folder, _ = ended
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "model" / name).read_text() == (folder / "tokenizer" / name).read_text()
    saved = json.loads((folder / "model" / "tokenizer.json").read_text())
    assert saved["truncation"] is saved["padding"] is None


def test_the_same_seed_makes_the_same_model(ended, train_decoder, weights_of, tmp_path):
    folder, results = ended
    expected = weights_of(folder)
    random.seed(5)
    again = train_decoder(tmp_path / "again", steps=6, workers=2)
    assert again["metrics"] == results["metrics"]
    assert again["generated"] == results["generated"]
    weights = weights_of(tmp_path / "again")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    other = train_decoder(tmp_path / "other", steps=6, seed=1)
    assert other["metrics"] != results["metrics"]
    assert other["generated"] != results["generated"]


class Killed(BaseException):
    """What no code catches."""


STEPS = {"steps": 8, "save_every": 3, "evaluate_every": 2, "log_every": 1, "dropout": 0.2, "accumulation": 2}


@pytest.fixture(scope="module")
def straight(train_decoder, tmp_path_factory):
    """A run that nothing interrupts, of about three epochs."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    results = train_decoder(folder, batch_size=36, **STEPS)
    assert results["epoch"] >= 2
    return folder, results


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_a_killed_run_goes_on_to_the_same_end(
    straight, train_decoder, weights_of, history_of, tmp_path, monkeypatch, step
):
    whole = Loop._step

    def until(self, *args):
        result = whole(self, *args)
        if self.progress.step == step:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", until)
        with pytest.raises(Killed):
            train_decoder(tmp_path / "run", batch_size=36, **STEPS)
    results = train_decoder(tmp_path / "run", resume=True, batch_size=36)
    folder, expected = straight
    for name in ("metrics", "generated", "data", "step", "epoch", "tokens"):
        assert results[name] == expected[name]
    weights, expected_weights = weights_of(tmp_path / "run"), weights_of(folder)
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert history_of(tmp_path / "run") == history_of(folder)


def test_parts_of_a_batch_add_up_to_the_whole(train_decoder, weights_of, history_of, tmp_path):
    settings = {"steps": 5, "dropout": 0.0, "log_every": 1}
    for accumulation in (1, 3):
        train_decoder(tmp_path / str(accumulation), accumulation=accumulation, **settings)
    whole, parts = (
        [figures["loss"] for _, kind, figures in history_of(tmp_path / name) if kind == "train"] for name in "13"
    )
    assert parts == pytest.approx(whole, rel=1e-4)
    whole, parts = (weights_of(tmp_path / name) for name in "13")
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-2, atol=1e-3)


def test_the_default_length_of_a_run(train_decoder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(DECODER, "default_steps", 2)
    with caplog.at_level(logging.INFO, logger="regard"):
        assert train_decoder(tmp_path / "run")["step"] == 2
    assert any("9 documents with" in message and "held out: 3 documents" in message for message in caplog.messages)


# Learning


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory):
    """A run on one sentence, again and again."""
    folder = tmp_path_factory.mktemp("heart")
    sentence = "The violin plays beside the old river, and nobody in the garden listens to it. "
    (folder / "corpus.txt").write_text("\n".join([sentence * 6] * 8))
    settings = {
        **TINY,
        "data": [str(folder / "corpus.txt")],
        "documents": "line",
        "learning_rate": 0.01,
        "dropout": 0.0,
        "steps": 120,
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    return sentence, folder / "run", train(DECODER, folder / "run", settings)


def test_a_sentence_is_learned_by_heart(by_heart, history_of):
    _, folder, results = by_heart
    assert results["metrics"]["perplexity"] < 1.5
    assert results["metrics"]["token_accuracy"] > 0.9
    losses = [values["loss"] for _, kind, values in history_of(folder) if kind == "train"]
    assert losses[-1] < losses[0] / 5


def test_what_was_learned_by_heart_is_recited(by_heart):
    sentence, _, results = by_heart
    assert results["generated"]
    for example in results["generated"]:
        assert example["prompt"]
        assert example["continuation"]
        assert (sentence * 6).startswith(example["prompt"] + example["continuation"])


def test_the_model_is_less_perplexed_than_the_baseline(train_decoder, tmp_path):
    metrics = train_decoder(tmp_path / "run", steps=120, learning_rate=0.01, evaluate_every=0, save_every=0)["metrics"]
    assert metrics["perplexity"] < 0.5 * metrics["perplexity_unigram"]
    assert metrics["token_accuracy"] > 2 * metrics["token_accuracy_baseline"]


# Continuations


def test_prompts_are_the_beginnings_of_held_out_documents(ended):
    _, results = ended
    _, held_out = load_split(DecoderSettings(**results["settings"]))
    assert len(results["generated"]) == 3
    for document in held_out["text"]:
        assert sum(document.startswith(example["prompt"]) for example in results["generated"]) == 1
    assert all(len(example["prompt"]) > 3 for example in results["generated"])


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
    _, held_out = load_split(DecoderSettings(**results["settings"]))
    texts = [byte_level(row, add_special_tokens=False)["input_ids"] for row in held_out["text"]]
    assert results["data"]["held_out_tokens"] == sum(map(len, texts)) + len(texts) * (1 + begins)


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_tokenizer_without_a_special_token(byte_level, train_decoder, tmp_path, name):
    taken = copy.deepcopy(byte_level)
    setattr(taken, f"{name}_token", None)
    taken.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=f"has no {name} token, which training needs"):
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
    monkeypatch.setattr(text, "load_documents", lambda *args, **options: pytest.fail("the data is read"))
    monkeypatch.setattr(decoder, "load_split", lambda *args, **options: pytest.fail("the data is read"))
    with pytest.raises(ValueError, match=complaint):
        train_decoder(tmp_path / "run", **given)
