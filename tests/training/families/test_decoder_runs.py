"""Runs of the decoder: what they tell, go on from, learn and recite."""

import json
import logging
import random

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from regard.modeling.decoder import RegardDecoderForCausalLM
from regard.training.families.decoder import DECODER, DecoderObjective, DecoderSettings
from regard.training.families.text_corpus import load_document_split
from regard.training.families.train import train
from regard.training.loop.loop import Loop
from tests.support.decoding import TINY, chunks_of, figures


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
    parts = load_document_split(DecoderSettings(**results["settings"]))
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
    train_part, held_out = load_document_split(DecoderSettings(**results["settings"]))
    parts = (chunks_of(part["text"], tokenizer) for part in (train_part, held_out))
    _, metrics = figures(DecoderObjective(*parts, tokenizer.pad_token_id, len(tokenizer)), model)
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
    _, held_out = load_document_split(DecoderSettings(**results["settings"]))
    assert len(results["generated"]) == 3
    for document in held_out["text"]:
        assert sum(document.startswith(example["prompt"]) for example in results["generated"]) == 1
    assert all(len(example["prompt"]) > 3 for example in results["generated"])
