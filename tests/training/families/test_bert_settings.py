"""Every setting does what it says: its two values differ where they should, and nowhere else."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from regard.training.families import settings as sizes
from regard.training.families import text_corpus
from regard.training.families.bert import BERT, BertSettings
from regard.training.families.text_corpus import load_document_split
from regard.training.loop import loop
from regard.training.run.checkpoints import list_checkpoints

BASE = {"steps": 4, "log_every": 1, "evaluate_every": 2, "save_every": 2, "batch_size": 4, "learning_rate": 0.01}

# What these change, the weights show. `None` takes back what the base run sets.
CHANGE_THE_WEIGHTS = {
    "data": {"data": ["OTHER"]},
    "language": {"language": "fr"},
    "validation": {"validation": "0.5"},
    "max_length": {"max_length": 24},
    "steps": {"steps": 5},
    "epochs": {"epochs": 0.5, "steps": None},
    "minutes": {"minutes": 1e-7, "steps": None},
    "batch_size": {"batch_size": 3},
    "learning_rate": {"learning_rate": 0.02},
    "warmup": {"warmup": 0.5},
    "schedule": {"schedule": "cosine"},
    "weight_decay": {"weight_decay": 0.5},
    "clip": {"clip": 0.01},
    "precision": {"precision": "bf16"},
    "seed": {"seed": 1},
    "tokenizer": {"tokenizer": "TOKENIZER"},
    "vocab_size": {"vocab_size": 110},
    "lowercase": {"lowercase": False},
    "strip_accents": {"strip_accents": True},
    "size": {"size": "mini", "config": {"max_position_embeddings": 32}},
    "config": {
        "config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    },
    "mask_rate": {"mask_rate": 0.4},
    "whole_words": {"whole_words": True},
    "next_sentence": {"next_sentence": False},
    "short_seq_prob": {"short_seq_prob": 1.0},
    "dropout": {"dropout": 0.5},
}

# These change something else, and leave the weights as they are.
CHANGE_WHAT_IS_DONE_BESIDE = {
    "workers": ({"workers": 2}, "workers"),
    "evaluate_every": ({"evaluate_every": 1}, "evaluations"),
    "evaluation_batches": ({"evaluation_batches": 1}, "metrics"),
    "log_every": ({"log_every": 2}, "records"),
    "log_with": ({"log_with": ["tensorboard"]}, "logs"),
    "save_every": ({"save_every": 3}, "checkpoints"),
    "keep_last": ({"keep_last": 1}, "checkpoints"),
}

# How data is read is tested with the sources; here, that it is passed on.
READING = {
    "text_column": "body",
    "documents": "line",
    "split": "test",
    "streaming": True,
    "bad_records": "skip",
}

ELSEWHERE = {
    "accumulation",  # test_loop: the same sum, in other parts
    "compile",  # test_bert: the same figures
    "keep_best",  # test_keep_best: the model is another
    "max_documents",  # below
    "sharding",  # test_distributed: the same weights, shared out
    "skip_nonfinite",  # test_nonfinite
}


def test_no_setting_is_forgotten():
    tested = [*CHANGE_THE_WEIGHTS, *CHANGE_WHAT_IS_DONE_BESIDE, *READING, *ELSEWHERE]
    assert sorted(tested) == sorted(field.name for field in dataclasses.fields(BertSettings))


@pytest.fixture(scope="module")
def sources(tmp_path_factory, tokenizer, texts) -> dict[str, str]:
    """A corpus in which every setting matters, another one, and a tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    for name, varied in (("BASE", texts), ("OTHER", texts[:10])):
        (folder / name).mkdir()
        for number, own in enumerate(varied):
            own = own.replace("a ", "Café Dr. Smith ", 2)
            (folder / name / f"{number}.txt").write_text(own, encoding="utf-8")
    tokenizer.save_pretrained(folder / "TOKENIZER")
    return {name: str(folder / name) for name in ("BASE", "OTHER", "TOKENIZER")}


@pytest.fixture(scope="module")
def observe(pretrain, sources, tmp_path_factory, weights_of, history_of):
    """Runs with some settings, and says what came of it."""

    def run(**given) -> dict:
        folder: Path = tmp_path_factory.mktemp("run") / "run"
        settings = {"data": ["BASE"], **BASE, **given}
        settings["data"] = [sources[name] for name in settings["data"]]
        if "tokenizer" in settings:
            settings["tokenizer"] = sources[settings["tokenizer"]]
        workers = set()
        whole = loop.make_loader

        def watched(*args):
            loader = whole(*args)
            workers.add(loader.num_workers)
            return loader

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "make_loader", watched)
            results = pretrain(folder, **settings)
        steps = [(kind, step) for step, kind, _ in history_of(folder)]
        return {
            "weights": weights_of(folder),
            "metrics": results["metrics"],
            "evaluations": [step for kind, step in steps if kind == "evaluation"],
            "records": [step for kind, step in steps if kind == "train"],
            "checkpoints": [path.name for path in list_checkpoints(folder / "checkpoints")],
            "logs": bool(list(folder.rglob("events.out*"))),
            "workers": workers,
        }

    return run


@pytest.fixture(scope="module")
def base(observe) -> dict:
    return observe()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_can_be_repeated_to_the_bit(observe, base):
    again = observe()
    assert same(again.pop("weights"), base["weights"])
    assert again == {name: value for name, value in base.items() if name != "weights"}


@pytest.mark.parametrize("name", CHANGE_THE_WEIGHTS)
def test_settings_that_change_what_is_learned(name, observe, base):
    assert not same(observe(**CHANGE_THE_WEIGHTS[name])["weights"], base["weights"])


@pytest.mark.parametrize("name", CHANGE_WHAT_IS_DONE_BESIDE)
def test_settings_that_do_not(name, observe, base):
    given, changed = CHANGE_WHAT_IS_DONE_BESIDE[name]
    found = observe(**given)
    assert same(found.pop("weights"), base["weights"])
    assert {observable for observable in found if found[observable] != base[observable]} == {changed}


def test_what_the_defaults_mean(observe, base):
    """A value that is spelled out gives what leaving it out gives."""
    defaults = {"seed": 0, "workers": 0, "clip": 1.0, "whole_words": False, "dropout": 0.1, "accumulation": 1}
    assert same(observe(**defaults)["weights"], base["weights"])
    assert same(observe(evaluate_every=0, save_every=0)["weights"], base["weights"])


@pytest.fixture
def reads(monkeypatch, texts) -> list[tuple]:
    """What is asked of the sources."""
    from datasets import Dataset

    asked = []

    def load(data, **options):
        asked.append((data, options))
        return Dataset.from_dict({"text": texts})

    monkeypatch.setattr(text_corpus, "load_documents", load)
    return asked


def test_how_data_is_read_is_passed_on(reads):
    load_document_split(BertSettings(data=["a", "b"], max_documents=5, **READING))
    assert reads == [(["a", "b"], {"max_documents": 5, **READING})]


def test_held_out_data_is_read_the_same_way_and_in_full(reads):
    load_document_split(BertSettings(data=["a"], validation="b", max_documents=5, **READING))
    assert reads == [(["b"], {"max_documents": None, **READING}), (["a"], {"max_documents": 5, **READING})]


def test_a_configuration_goes_before_the_size():
    config = BERT.make_config(BertSettings(size="small", config={"hidden_size": 128, "num_attention_heads": 4}))
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (128, 4, 4)


@pytest.mark.parametrize("size", sizes.SIZES)
def test_sizes(size):
    config = BERT.make_config(BertSettings(size=size, dropout=0.3, vocab_size=77))
    assert (config.num_hidden_layers, config.hidden_size) == sizes.SIZES[size]
    assert config.num_attention_heads == {128: 4, 256: 4, 512: 8, 768: 12, 1024: 16}[config.hidden_size]
    assert config.intermediate_size == 4 * config.hidden_size
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.3
    assert config.vocab_size == 77


def test_what_goes_with_the_width():
    """The learning rate falls with it, and the variance of the weights too; what is given goes before."""
    settings = {size: BertSettings(size=size) for size in sizes.SIZES}
    assert {own.learning_rate * sizes.SIZES[size][1] for size, own in settings.items()} == {0.256}
    variances = {size: BERT.make_config(own).initializer_range ** 2 for size, own in settings.items()}
    assert [variance * sizes.SIZES[size][1] for size, variance in variances.items()] == pytest.approx(
        [0.02**2 * 768] * 6
    )
    given = BertSettings(size="small", learning_rate=0.1, config={"initializer_range": 0.5})
    assert (given.learning_rate, BERT.make_config(given).initializer_range) == (0.1, 0.5)


def test_the_tokenizer_has_its_say_in_the_configuration(tokenizer):
    config = BERT.make_config(BertSettings(vocab_size=5_000), tokenizer)
    assert config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.sep_token_id) == (tokenizer.pad_token_id, tokenizer.sep_token_id)
    # A vocabulary may be padded.
    assert BERT.make_config(BertSettings(config={"vocab_size": 128}), tokenizer).vocab_size == 128


def test_positions_must_reach():
    with pytest.raises(
        ValueError, match=r"`max_length` \(600\) is more than `max_position_embeddings` \(512\)"
    ) as raised:
        BERT.make_config(BertSettings(max_length=600))
    assert "max_position_embeddings=600" in str(raised.value)
    given = {"max_position_embeddings": 600}
    assert BERT.make_config(BertSettings(max_length=600, config=given)).max_position_embeddings == 600


def test_settings_are_kept_with_the_results(pretrain, tmp_path):
    results = pretrain(tmp_path / "run", steps=1)
    assert results["settings"] == json.loads((tmp_path / "run" / "results.json").read_text())["settings"]
    assert results["settings"]["steps"] == 1
    assert results["settings"].keys() == {field.name for field in dataclasses.fields(BertSettings)}


def test_rate_and_initial_weights_follow_the_width_wherever_it_is_set():
    by_size = BertSettings(size="mini")
    by_field = BertSettings(size="tiny", config={"hidden_size": 256})
    narrower = BertSettings(size="tiny")
    assert by_size.learning_rate == by_field.learning_rate == narrower.learning_rate / 2
    ranges = [BERT.make_config(settings).initializer_range for settings in (by_size, by_field, narrower)]
    assert ranges[0] == ranges[1] == pytest.approx(ranges[2] / 2**0.5)
    assert BERT.make_config(BertSettings(size="base")).initializer_range == 0.02
