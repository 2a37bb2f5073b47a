"""Backbones and settings of the captioner."""

import dataclasses
import json
import logging

import pytest
import torch
from transformers import (
    AutoProcessor,
    BertConfig,
    ResNetBackbone,
    ResNetConfig,
    ResNetForImageClassification,
)

from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.words import train_words
from regard.training.families.captioner import CAPTIONER, CaptionerSettings
from regard.training.run.settings import TrainingSettings
from tests.support.captions import CAPTIONS, SIZED, TINY, write_images

LARGE_PATCHES = {"model_type": "convnext", "patch_size": 16, "hidden_sizes": [8] * 4, "depths": [1] * 4}
SMALL_RESNET = {"embedding_size": 8, "hidden_sizes": [12, 20], "depths": [1, 1], "layer_type": "basic"}


# Backbones


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory) -> str:
    """A small trained backbone."""
    torch.manual_seed(5)
    backbone = ResNetBackbone(ResNetConfig(**SMALL_RESNET, out_features=["stage2"]))
    for name, buffer in backbone.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    folder = tmp_path_factory.mktemp("backbone") / "backbone"
    backbone.save_pretrained(folder)
    return str(folder)


def in_model(weights: dict) -> dict:
    prefix = "encoder.backbone."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
def test_backbones(is_frozen, is_trained, caption, backbone_folder, tmp_path, weights_of):
    given = {"freeze_backbone": is_frozen, "backbone": backbone_folder if is_trained else None}
    started = {}
    make = CAPTIONER.make_model

    def watched(settings, processor=None):
        model = make(settings, processor)
        if processor is not None:
            started.update({name: value.clone() for name, value in model.state_dict().items()})
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CAPTIONER, "make_model", watched)
        caption(tmp_path / "run", **given, learning_rate=0.01)
    ended = weights_of(tmp_path / "run")
    if is_trained:
        expected = ResNetBackbone.from_pretrained(backbone_folder).state_dict()
        assert in_model(started).keys() == expected.keys()
        assert all(torch.equal(in_model(started)[name], expected[name]) for name in expected)
    kept = {name: torch.equal(weight, in_model(started)[name]) for name, weight in in_model(ended).items()}
    assert len(kept) > 10
    if is_frozen:
        # Its running means as well.
        assert all(kept.values())
    else:
        assert not any(same for name, same in kept.items() if "running" in name or name.endswith("weight"))
    others = [name for name in ended if not name.startswith("encoder.backbone.")]
    assert not any(torch.equal(ended[name], started[name]) for name in others)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["freeze_backbone"] is is_frozen
    assert (config["backbone_config"]["hidden_sizes"] == [12, 20]) == is_trained


def test_a_backbone_may_be_part_of_another_model(tmp_path):
    """That of an image classifier, as most are on the Hub: its last stage is read."""
    classifier = ResNetForImageClassification(ResNetConfig(**SMALL_RESNET))
    classifier.save_pretrained(tmp_path / "classifier")
    processor = make_captioner_processor(train_words(["a b"]), 32)
    model = CAPTIONER.make_model(CaptionerSettings(backbone=str(tmp_path / "classifier")), processor)
    expected, weights = classifier.resnet.state_dict(), model.encoder.backbone.state_dict()
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert model.encoder.backbone.channels == [20]


def test_backbones_that_cannot_be(caption, backbone_folder, tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    ResNetConfig(**SMALL_RESNET).save_pretrained(tmp_path / "empty")
    ResNetBackbone(ResNetConfig(**SMALL_RESNET, num_channels=1)).save_pretrained(tmp_path / "grey")
    other = ResNetBackbone(ResNetConfig(**{**SMALL_RESNET, "depths": [1, 2]}))
    other.config.depths = [2, 2]
    other.save_pretrained(tmp_path / "lacking")
    (tmp_path / "none").mkdir()
    for name, complaint in (
        ("bert", "has the model type 'bert', for which transformers has no AutoBackbone"),
        ("grey", r"the backbone \(`num_channels` 1\) must read 3 channels"),
        ("empty", "no file named model.safetensors"),
        ("lacking", r"lacks \d+ of the weights that it needs, such as encoder"),
        ("nowhere", r"`backbone` \(.*nowhere\) is no folder here, and could not be loaded from the Hub"),
    ):
        with pytest.raises((ValueError, OSError), match=complaint) as raised:
            caption(tmp_path / "run", backbone=str(tmp_path / name))
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


# Settings

# What these change, the weights show.
CHANGE_THE_WEIGHTS = {
    "caption_column": {"caption_column": "other"},
    "max_images": {"max_images": 12},
    "image_size": {"image_size": 41},
    "max_length": {"max_length": 5},
    "batch_size": {"batch_size": 3},
    "min_frequency": {"min_frequency": 5},
    "decoder_type": {"decoder_type": "transformer", "config": SIZED["transformer"]},
    "alignment": {"alignment": "bilinear"},
    "rnn_type": {"rnn_type": "gru"},
    "attention_regularization": {"attention_regularization": 0.0},
    "label_smoothing": {"label_smoothing": 0.2},
    "size": {"size": "mini", "config": {"hidden_size": 256}},
    "config": {"config": {"hidden_size": 24, "num_hidden_layers": 2}},
    "dropout": {"dropout": 0.4},
}
ELSEWHERE = {
    "data",  # test_glyphs_are_the_default
    "tokenizer",  # below, as the next ones
    "beams",
    "language",
    "backbone",  # test_backbones, as for the next
    "freeze_backbone",
}


def test_no_setting_is_forgotten():
    inherited = {field.name for field in dataclasses.fields(TrainingSettings)} - {"data", "max_length", "batch_size"}
    own = {field.name for field in dataclasses.fields(CaptionerSettings)} - inherited
    assert own == {*CHANGE_THE_WEIGHTS, *ELSEWHERE}


@pytest.fixture(scope="module")
def two_columns(tmp_path_factory) -> str:
    """Images with two captions each, some of whose words are rare."""
    folder = tmp_path_factory.mktemp("two") / "images"
    write_images(folder, CAPTIONS)
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["other"] = f"{'dark' if number % 3 else 'light'} picture {number}"
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder)


@pytest.fixture(scope="module")
def plain_weights(two_columns, caption, tmp_path_factory, weights_of):
    folder = tmp_path_factory.mktemp("plain") / "run"
    caption(folder, data=[two_columns], steps=2)
    return weights_of(folder)


@pytest.mark.parametrize("name", CHANGE_THE_WEIGHTS)
def test_settings_that_change_what_is_learned(name, two_columns, plain_weights, caption, tmp_path, weights_of):
    caption(tmp_path / "run", **{"data": [two_columns], "steps": 2, **CHANGE_THE_WEIGHTS[name]})
    weights = weights_of(tmp_path / "run")
    assert weights.keys() != plain_weights.keys() or any(
        weights[key].shape != plain_weights[key].shape or not torch.equal(weights[key], plain_weights[key])
        for key in weights
    )


def test_settings_reach_the_configuration():
    given = {"label_smoothing": 0.2, "attention_regularization": 0.4, "dropout": 0.3, "max_length": 11}
    given |= {"alignment": "dot", "rnn_type": "gru", "freeze_backbone": True, "size": "mini"}
    config = CAPTIONER.make_config(CaptionerSettings(**given))
    assert (config.label_smoothing, config.attention_regularization, config.hidden_dropout_prob) == (0.2, 0.4, 0.3)
    assert (config.max_position_embeddings, config.alignment, config.rnn_type) == (11, "dot", "gru")
    assert (config.freeze_backbone, config.hidden_size, config.num_hidden_layers) == (True, 256, 1)
    assert CAPTIONER.make_config(CaptionerSettings(**given, decoder_type="transformer")).num_hidden_layers == 4


def test_several_sources_are_joined(images, two_columns, caption, tmp_path):
    own = {"data": [images, two_columns], "validation": "0.5", "steps": 1}
    assert caption(tmp_path / "all", **own)["data"]["images"] == 20
    # The most images are those of all together.
    assert caption(tmp_path / "some", **own, max_images=24)["data"]["images"] == 12


def test_the_language_is_in_the_card(images, tmp_path):
    from regard.commands.train import train_captioner

    train_captioner(tmp_path / "run", {**TINY, "data": [images], "steps": 1, "language": "eo"})
    assert "language: eo\n" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_a_tokenizer_is_taken_as_it_is(caption, tmp_path):
    words = train_words(["a grey bright image no", "of nothing else"], lowercase=False)
    words.save_pretrained(tmp_path / "words")
    results = caption(tmp_path / "run", tokenizer=str(tmp_path / "words"))
    processor = AutoProcessor.from_pretrained(tmp_path / "run" / "model")
    assert processor.tokenizer.get_vocab() == words.get_vocab()
    # The signs and numbers are not among its words.
    assert all(shown["target"].endswith("image no <unk> <unk>") for shown in results["generated"])
    assert results["metrics"]["exact_match"] == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(words)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_images": 0}, r"`max_images` \(0\) must be at least 1"),
        ({"image_size": 0}, r"`image_size` \(0\) must be at least 1"),
        ({"min_frequency": 0}, r"`min_frequency` \(0\) must be at least 1"),
        ({"min_frequency": 99}, r"no words that occur `min_frequency` \(99\) times"),
        ({"beams": 0}, r"`beams` \(0\) must be at least 1"),
        ({"beams": 1001}, r"`beams` \(1001\) must be at least 1 and at most 1000"),
        ({"image_size": 16385}, r"`image_size` \(16385\) must be at least 1 and at most 16384"),
        ({"max_length": 1}, r"`max_length` \(1\) must be at least 2 and at most"),
        ({"decoder_type": "cnn"}, r"`decoder_type` \('cnn'\) must be one of recurrent, transformer"),
        ({"alignment": "dott"}, r"`alignment` \('dott'\) must be one of dot, scaled_dot, bilinear, additive, none"),
        ({"rnn_type": "rnn"}, r"`rnn_type` \('rnn'\) must be one of gru, lstm"),
        ({"label_smoothing": 1.0}, r"`label_smoothing` \(1.0\) must be at least 0 and less than 1"),
        ({"attention_regularization": -1.0}, r"`attention_regularization` \(-1.0\) must be at least 0"),
        ({"size": "huge"}, r"`size` \('huge'\) must be one of tiny"),
        ({"dropout": 1.0}, r"`dropout` \(1.0\) must be at least 0 and less than 1"),
        ({"config": {"vocab_size": 5}}, "`vocab_size` of at least"),
        (
            {"config": {"max_position_embeddings": 6}},
            r"`max_length` \(7\) is more than `max_position_embeddings` \(6\)",
        ),
        ({"config": {"hiden_size": 6}}, "hiden_size.*hidden_size"),
        (
            {"image_size": 9, "config": {"backbone_config": LARGE_PATCHES}},
            "the backbone cannot read images of 9 x 9 pixels",
        ),
        ({"backbone": "x/y", "config": {"backbone_config": {}}}, r"`backbone` \(x/y\) has a configuration: leave"),
        ({"data": ["glyphs:latin"]}, r"`data` \('glyphs:latin'\) asks for some of 'glyphs', which has no parts"),
        ({"data": ["glyphs"], "image_size": 31}, r"`image_size` \(31\) must be at least 32"),
        ({"data": []}, "`data` names no source"),
        ({"batch_size": 16}, "15 examples, fewer than one batch"),
        ({"caption_column": "words"}, "no column 'words'; `caption_column` can be 'file_name', 'text'"),
    ],
)
def test_nothing_is_written_for_a_run_that_cannot_be(given, complaint, caption, tmp_path):
    with pytest.raises(ValueError, match=complaint) as raised:
        caption(tmp_path / "run", **given)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_read(caption, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="regard"):
        caption(tmp_path / "run", steps=1)
    assert "15 images, captions of 105 tokens; held out: 5 images." in caplog.messages
