"""Configurations refuse what they do not know and what cannot be, in one line that says what can."""

import dataclasses
import json
import logging
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, BertConfig, PreTrainedConfig

from regard import RegardBertConfig, RegardBertModel
from tests.support.families import FAMILIES

every_family = pytest.mark.parametrize("config_class", FAMILIES, ids=lambda config_class: config_class.model_type)


def edit(folder, remove=(), **fields) -> None:
    path = folder / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in remove}
    path.write_text(json.dumps(config | fields))


def plain(config) -> dict:
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


@every_family
@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("hidden_sise", "hidden_size"),
        ("vocabulary_size", "vocab_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("initialiser_range", "initializer_range"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_nearest(config_class, misspelt, right):
    assert right in {field.name for field in dataclasses.fields(config_class)}
    with pytest.raises(ValueError, match=f"no field `{misspelt}`: did you mean `{right}`") as error:
        config_class(**{misspelt: 12})
    assert type(error.value) is ValueError
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"did you mean `{right}`"):
        AutoConfig.for_model(config_class.model_type, **{misspelt: 12})


@every_family
def test_a_field_like_no_other_is_answered_with_all(config_class):
    with pytest.raises(ValueError, match="no field `zzz`: its fields are ") as error:
        config_class(zzz=1)
    assert all(field.name in str(error.value) for field in dataclasses.fields(config_class))


@every_family
def test_a_saved_field_of_a_later_version_is_kept_with_a_warning(config_class, tmp_path, caplog):
    config_class().save_pretrained(tmp_path)
    edit(tmp_path, hidden_colour="red")
    with caplog.at_level(logging.WARNING):
        config = config_class.from_pretrained(tmp_path)
    messages = [record.getMessage() for record in caplog.records if "hidden_colour" in record.getMessage()]
    assert messages
    assert all("did you mean" in message for message in messages)
    assert config.hidden_colour == "red"
    config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["hidden_colour"] == "red"
    # One written by hand has no version, and is no later one.
    edit(tmp_path, remove=["transformers_version"])
    with pytest.raises(ValueError, match="no field `hidden_colour`"):
        config_class.from_pretrained(tmp_path)


@every_family
def test_the_settings_of_transformers_are_no_misspelt_fields(config_class, caplog):
    with caplog.at_level(logging.WARNING):
        config = config_class(
            num_labels=7,
            output_attentions=True,
            output_hidden_states=True,
            attn_implementation="eager",
            torch_dtype="bfloat16",
            problem_type="regression",
            architectures=["Something"],
            name_or_path="somewhere",
        )
    assert caplog.records == []
    assert (config.num_labels, config.output_attentions, config.dtype) == (7, True, torch.bfloat16)


@every_family
def test_a_round_trip_changes_nothing(config_class, tmp_path, caplog):
    # A value of its own for each size, so that no two can be exchanged.
    sizes = {
        "vocab_size": 61,
        "hidden_size": 30,
        "num_attention_heads": 5,
        "num_hidden_layers": 3,
        "num_labels": 4,
    }
    sizes = {name: value for name, value in sizes.items() if name == "num_labels" or config_class.knows(name)}
    config = config_class(**sizes)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == config_class.model_type
    with caplog.at_level(logging.WARNING):
        for loaded in (config_class.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
            assert type(loaded) is config_class
            assert {name: getattr(loaded, name) for name in sizes} == sizes
            assert plain(loaded) == plain(config) | {"transformers_version": loaded.transformers_version}
        assert plain(config_class(**loaded.to_dict())) == plain(loaded)
    assert caplog.records == []
    assert config_class.from_pretrained(tmp_path, num_hidden_layers=7).num_hidden_layers == 7


@every_family
def test_every_field_has_a_type_that_is_checked(config_class):
    """`strict` passes over the strings that `from __future__ import annotations` makes of types."""
    found = dataclasses.fields(config_class)
    assert {field.name for field in found} > {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert [field.name for field in found if isinstance(field.type, str)] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "12"),
        ("hidden_size", 12.0),
        ("hidden_size", None),
        ("hidden_dropout_prob", "0.1"),
        ("hidden_act", 3),
        ("tie_word_embeddings", "yes"),
        ("pad_token_id", "[PAD]"),
        ("chunk_size_feed_forward", []),
        ("id2label", ["good", "bad"]),
        ("problem_type", "guessing"),
        ("is_encoder_decoder", "no"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(field, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        RegardBertConfig(**{field: value})
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        setattr(RegardBertConfig(), field, value)


SIZES = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings
type_vocab_size""".split()


@pytest.mark.parametrize("field", SIZES)
def test_the_least_size_is_one(field):
    # A vocabulary of one holds the padding token alone.
    assert getattr(RegardBertConfig(**{field: 1}), field) == 1
    with pytest.raises(ValueError, match=rf"`{field}` \({2**31}\) must be less than 2\*\*31"):
        RegardBertConfig(**{field: 2**31})
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=rf"`{field}` \({wrong}\) must be at least 1$") as error:
            RegardBertConfig(**{field: wrong})
        assert type(error.value) is ValueError


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps"])
def test_what_is_no_finite_number_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` \({value}\) must be a finite number"):
        RegardBertConfig(**{field: value})


@every_family
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float23"),
        ("torch_dtype", "nn"),
        ("num_labels", 0),
        ("num_labels", "two"),
        ("id2label", {"good": 0}),
        ("model_type", ["regard_bert"]),
    ],
)
def test_what_transformers_would_stumble_over(config_class, name, value, tmp_path):
    message = rf"`{name}` [^\n]*{re.escape(next(map(repr, value)) if name == 'id2label' else repr(value))}"
    with pytest.raises(ValueError, match=message):
        config_class(**{name: value})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config_class.model_type, name: value}))
    with pytest.raises(ValueError, match=message):
        config_class.from_pretrained(tmp_path)


def test_a_number_of_labels_that_is_not_given():
    assert RegardBertConfig(num_labels=None).num_labels == 2


@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps", "chunk_size_feed_forward"])
def test_what_may_be_zero_may_not_be_less(field):
    zero = 0 if field == "chunk_size_feed_forward" else 0.0
    assert getattr(RegardBertConfig(**{field: zero}), field) == 0
    with pytest.raises(ValueError, match=rf"`{field}` \(-1.*\) must be at least 0$"):
        RegardBertConfig(**{field: zero - 1})


@pytest.mark.parametrize("field", ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"])
def test_a_dropout_is_a_probability_below_one(field):
    for right in (0, 0.0, 0.99):
        assert getattr(RegardBertConfig(**{field: right}), field) == right
    for wrong in (1.0, 1, -0.1, 10):
        with pytest.raises(ValueError, match=rf"`{field}` \({wrong}\) must be at least 0 and less than 1$"):
            RegardBertConfig(**{field: wrong})


@pytest.mark.parametrize("field", ["pad_token_id", "sep_token_id"])
def test_a_special_token_is_in_the_vocabulary(field):
    for right in (0, 39, None):
        assert getattr(RegardBertConfig(vocab_size=40, **{field: right}), field) == right
    for wrong in (40, -1):
        with pytest.raises(ValueError, match=rf"`{field}` \({wrong}\) must be an id of the vocabulary, 0 to 39$"):
            RegardBertConfig(vocab_size=40, **{field: wrong})


def test_without_a_padding_token_every_id_is_trained():
    model = RegardBertModel(RegardBertConfig(**TINY, pad_token_id=None))
    model(torch.zeros(1, 3, dtype=torch.long)).last_hidden_state[0, 0, 0].backward()
    assert (model.embeddings.tokens.weight.grad[0] != 0).any()


def test_an_unknown_activation_is_answered_with_the_nearest():
    assert RegardBertConfig(hidden_act="gelu_new").hidden_act == "gelu_new"
    with pytest.raises(ValueError, match=r"`hidden_act` \('gelu_neww'\) must be one of .*gelu.*mean 'gelu_new'\?"):
        RegardBertConfig(hidden_act="gelu_neww")
    with pytest.raises(ValueError, match=r"`hidden_act` \('zzz'\) must be one of .*relu") as error:
        RegardBertConfig(hidden_act="zzz")
    assert "did you mean" not in str(error.value)


TINY = {
    "vocab_size": 40,
    "hidden_size": 15,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 22,
}


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"`hidden_size` \(15\) must be a multiple of `num_attention_heads` \(4\)"):
        RegardBertModel(RegardBertConfig(**(TINY | {"num_attention_heads": 4})))


# What stock BERT has besides: settings of a decoder, and of generation.
STOCK_ALONE = {"use_cache", "is_decoder", "add_cross_attention", "bos_token_id", "eos_token_id"}


def test_a_stock_configuration_is_read_in_full(tmp_path, caplog):
    stock = BertConfig(
        **TINY,
        hidden_act="relu",
        hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.2,
        max_position_embeddings=17,
        type_vocab_size=3,
        initializer_range=0.05,
        layer_norm_eps=1e-7,
        classifier_dropout=0.4,
        pad_token_id=9,
        tie_word_embeddings=False,
        chunk_size_feed_forward=2,
        problem_type="regression",
        id2label={0: "no", 1: "yes", 2: "maybe"},
        label2id={"no": 0, "yes": 1, "maybe": 2},
    )
    stock.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        ours = RegardBertConfig.from_pretrained(tmp_path)
    assert caplog.records == []
    names = {field.name for field in dataclasses.fields(BertConfig)}
    assert names - {field.name for field in dataclasses.fields(RegardBertConfig)} == STOCK_ALONE
    for name in sorted(names - STOCK_ALONE - {"transformers_version"}):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.model_type == "regard_bert"
    assert not any(hasattr(ours, name) for name in STOCK_ALONE)
    # What is saved is ours.
    ours.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is RegardBertConfig


def test_another_architecture_is_refused_by_its_name(tmp_path):
    BertConfig().save_pretrained(tmp_path)
    edit(tmp_path, model_type="gpt2")
    with pytest.raises(
        ValueError, match=r"`model_type` is 'gpt2', but RegardBertConfig reads 'bert' or 'regard_bert'"
    ):
        RegardBertConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_decoder", True), ("add_cross_attention", True), ("position_embedding_type", "relative_key")],
)
def test_settings_that_compute_something_else_are_refused(field, value):
    with pytest.raises(ValueError, match=f"`{field}` of a BERT must be .* to be read as regard_bert"):
        RegardBertConfig(**{field: value})
