"""Every setting of a run on pairs does what it says."""

import dataclasses
import json
from functools import cache

import pytest
import torch

from regard.training.families import seq2seq
from regard.training.families import settings as sizes
from regard.training.families.seq2seq import RECURRENT, TRANSFORMER, PairSettings, RecurrentSettings
from regard.training.run.settings import TrainingSettings

FAMILIES = ("transformer", "recurrent")

# What these change, the weights show.
CHANGE_THE_WEIGHTS = {
    "data": {"data": ["dates:fr"]},
    "max_pairs": {"max_pairs": 50},
    "max_dates": {"max_dates": 1},
    "max_length": {"max_length": 45},
    "batch_size": {"batch_size": 6},
    "units": {"units": "pieces"},
    "vocab_size": {"units": "pieces", "vocab_size": 270},
    "label_smoothing": {"label_smoothing": 0.2},
    "size": {"size": "mini", "config": {"hidden_size": 256}},
    "config": {"config": {"num_hidden_layers": 2}},
    "dropout": {"dropout": 0.4},
    "alignment": {"alignment": "bilinear"},
    "rnn_type": {"rnn_type": "lstm"},
}
ELSEWHERE = {
    "source_column",  # test_rows, as for the next
    "target_column",
    "tokenizer",  # test_seq2seq
    "beams",  # below
    "language",  # below
}


def own_fields(settings_class: type) -> set[str]:
    inherited = {field.name for field in dataclasses.fields(TrainingSettings)} - {"data", "max_length", "batch_size"}
    return {field.name for field in dataclasses.fields(settings_class)} - inherited


def test_no_setting_is_forgotten():
    assert own_fields(RecurrentSettings) == {*CHANGE_THE_WEIGHTS, *ELSEWHERE}
    assert own_fields(RecurrentSettings) - own_fields(PairSettings) == {"alignment", "rnn_type"}


@pytest.fixture(scope="module")
def learned(train_pairs, tmp_path_factory, weights_of):
    """Returns the weights after two steps with some settings; the same settings are trained with once."""

    @cache
    def train(given: str) -> dict:
        folder = tmp_path_factory.mktemp("runs") / "run"
        train_pairs("recurrent", folder, **{"steps": 2, "learning_rate": 0.01, **json.loads(given)})
        return weights_of(folder)

    return lambda given: train(json.dumps(given))


@pytest.mark.parametrize("name", CHANGE_THE_WEIGHTS)
def test_settings_that_change_what_is_learned(name, learned):
    # A vocabulary's size is that of pieces.
    base = {"units": "pieces"} if name == "vocab_size" else {}
    both = [learned(base), learned(CHANGE_THE_WEIGHTS[name])]
    assert both[0].keys() != both[1].keys() or any(
        both[0][key].shape != both[1][key].shape or not torch.equal(both[0][key], both[1][key]) for key in both[0]
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beams", [1, 3])
def test_beams_reach_generation(family, beams, train_pairs, tmp_path, monkeypatch):
    asked = []
    whole = seq2seq.generate_texts

    def watched(*args, **options):
        asked.append(options)
        return whole(*args, **options)

    monkeypatch.setattr(seq2seq, "generate_texts", watched)
    train_pairs(family, tmp_path / "run", beams=beams, steps=1)
    assert asked == [{"max_new_tokens": 90, "num_beams": beams}]


def test_the_language_is_kept_for_the_card(train_pairs, tmp_path):
    results = train_pairs("recurrent", tmp_path / "run", language="de", steps=1)
    assert results["settings"]["language"] == "de"


def test_the_configurations():
    given = {"size": "small", "dropout": 0.3, "label_smoothing": 0.2, "max_length": 99}
    transformer = TRANSFORMER.make_config(PairSettings(**given))
    recurrent = RECURRENT.make_config(RecurrentSettings(**given, alignment="dot", rnn_type="lstm"))
    for config in (transformer, recurrent):
        assert (config.hidden_size, config.hidden_dropout_prob, config.label_smoothing) == (512, 0.3, 0.2)
        assert config.initializer_range == pytest.approx(0.02 * 1.5**0.5)
    layers, _ = sizes.SIZES["small"]
    assert (transformer.num_hidden_layers, transformer.num_decoder_layers) == (layers, layers)
    assert (transformer.max_position_embeddings, transformer.norm_position) == (99, "pre")
    assert transformer.attention_probs_dropout_prob == 0.3
    assert (recurrent.alignment, recurrent.rnn_type) == ("dot", "lstm")
    fields = {"norm_position": "post", "max_position_embeddings": 120, "label_smoothing": 0.1}
    changed = TRANSFORMER.make_config(PairSettings(**given, config=fields))
    assert {name: getattr(changed, name) for name in fields} == fields
    assert RECURRENT.make_config(RecurrentSettings(**given, config={"alignment": "none"})).alignment == "none"


@pytest.mark.parametrize(
    ("family", "given", "complaint"),
    [
        ("transformer", {"units": "words"}, r"`units` \('words'\) must be one of characters, pieces"),
        ("transformer", {"max_pairs": 0}, r"`max_pairs` \(0\) must be at least 1"),
        ("transformer", {"max_dates": 0}, r"`max_dates` \(0\) must be at least 1"),
        ("transformer", {"beams": 0}, r"`beams` \(0\) must be at least 1"),
        ("recurrent", {"beams": 1001}, r"`beams` \(1001\) must be at least 1 and at most 1000"),
        ("transformer", {"max_length": 1}, r"`max_length` \(1\) must be at least 2"),
        ("transformer", {"max_length": 2}, r"all 60 pairs are longer than `max_length` \(2\)"),
        ("transformer", {"label_smoothing": 1.0}, r"`label_smoothing` \(1.0\) must be at least 0 and less than 1"),
        ("transformer", {"alignment": "dot"}, "there is no setting `alignment`"),
        ("transformer", {"max_length": 91, "config": {"max_position_embeddings": 90}}, r"`max_length` \(91\) is more"),
        ("transformer", {"config": {"hidden_size": 34, "num_attention_heads": 4}}, r"`hidden_size` \(34\) must be a"),
        ("transformer", {"config": {"vocab_size": 9}}, "`vocab_size` of at least"),
        ("transformer", {"units": "pieces", "vocab_size": 9}, r"`vocab_size` \(9\) must be at least"),
        ("transformer", {"batch_size": 61}, "60 examples, fewer than one batch"),
        ("transformer", {"data": []}, "`data` names no source"),
        ("transformer", {"validation": "2"}, r"`validation` \(2\.?0?\) must be a share"),
        ("recurrent", {"alignment": "dott"}, r"`alignment` \('dott'\) must be one of dot, scaled_dot"),
        ("recurrent", {"rnn_type": "rnn"}, r"`rnn_type` \('rnn'\) must be one of gru, lstm"),
        ("recurrent", {"label_smoothing": -0.1}, r"`label_smoothing` \(-0.1\) must be at least 0"),
        ("recurrent", {"dropout": 1.0}, r"`dropout` \(1.0\) must be at least 0 and less than 1"),
        ("recurrent", {"alignment": "dot", "config": {"encoder_hidden_size": 9}}, "DotAlignment needs"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(family, given, complaint, train_pairs, tmp_path):
    with pytest.raises(ValueError, match=complaint) as raised:
        train_pairs(family, tmp_path / "run", **given)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
