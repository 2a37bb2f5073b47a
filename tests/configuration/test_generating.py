"""The configurations of the families that generate: what they refuse, and what they fill in."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DynamicCache

from regard import (
    RegardCaptionerConfig,
    RegardDecoderConfig,
    RegardDecoderModel,
    RegardRecurrentConfig,
    RegardTransformerConfig,
    RegardTransformerModel,
)

DECODER, TRANSFORMER, RECURRENT = RegardDecoderConfig, RegardTransformerConfig, RegardRecurrentConfig
CAPTIONER = RegardCaptionerConfig
every_config = pytest.mark.parametrize(
    "config_class",
    [DECODER, TRANSFORMER, RECURRENT, CAPTIONER],
    ids=lambda config_class: config_class.model_type,
)


@every_config
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "12"),
        ("hidden_size", None),
        ("hidden_dropout_prob", "0.1"),
        ("use_cache", 1),
        ("tie_word_embeddings", "yes"),
        ("pad_token_id", "[PAD]"),
        ("eos_token_id", ["</s>"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(config_class, field, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        config_class(**{field: value})


@every_config
def test_sizes_are_at_least_one(config_class):
    for field in ("vocab_size", "hidden_size", "num_hidden_layers"):
        for wrong in (0, -3):
            with pytest.raises(ValueError, match=rf"`{field}` \({wrong}\) must be at least 1$") as error:
                config_class(**{field: wrong})
            assert type(error.value) is ValueError


@every_config
def test_special_tokens_are_in_the_vocabulary(config_class):
    fields = ["pad_token_id", "bos_token_id", "eos_token_id"]
    if config_class is not DECODER:
        fields.append("decoder_start_token_id")
    for field in fields:
        assert getattr(config_class(vocab_size=40, **{field: 39}), field) == 39
        for wrong in (40, -1):
            with pytest.raises(ValueError, match=rf"`{field}` \({wrong}\) must be an id of the vocabulary, 0 to 39$"):
                config_class(vocab_size=40, **{field: wrong})
    assert config_class(eos_token_id=[3, 5]).eos_token_id == [3, 5]


@pytest.mark.parametrize(
    ("config_class", "field", "wrong", "right", "all_of_them"),
    [
        (DECODER, "norm_position", "prae", "pre", ("pre", "post")),
        (TRANSFORMER, "norm_position", "posst", "post", ("pre", "post")),
        (DECODER, "position_embedding_type", "learnt", "learned", ("learned", "sinusoidal")),
        (TRANSFORMER, "position_embedding_type", "sinusoid", "sinusoidal", ("learned", "sinusoidal")),
        (DECODER, "hidden_act", "gelu_neww", "gelu_new", ("gelu", "relu")),
        (TRANSFORMER, "hidden_act", "reluu", "relu", ("gelu", "relu")),
        (RECURRENT, "alignment", "aditive", "additive", ("dot", "scaled_dot", "bilinear", "additive", "none")),
        (RECURRENT, "rnn_type", "gruu", "gru", ("gru", "lstm")),
    ],
)
def test_an_unknown_name_is_answered_with_the_real_ones(config_class, field, wrong, right, all_of_them):
    for name in all_of_them:
        assert getattr(config_class(**{field: name}), field) == name
    with pytest.raises(ValueError, match=rf"`{field}` \('{wrong}'\) must be one of .*did you mean '{right}'") as error:
        config_class(**{field: wrong})
    assert "\n" not in str(error.value)
    assert all(name in str(error.value) for name in all_of_them)


@pytest.mark.parametrize("config_class", [TRANSFORMER, RECURRENT], ids=lambda config_class: config_class.model_type)
def test_label_smoothing_is_a_share(config_class):
    for right in (0, 0.1, 0.99):
        assert config_class(label_smoothing=right).label_smoothing == right
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"`label_smoothing` \({wrong}\) must be at least 0 and less than 1$"):
            config_class(label_smoothing=wrong)


def test_what_is_not_given_follows_from_the_rest(tmp_path):
    assert TRANSFORMER(num_hidden_layers=4).num_decoder_layers == 4
    assert TRANSFORMER(num_hidden_layers=4, num_decoder_layers=3).num_decoder_layers == 3
    assert RECURRENT(hidden_size=30).encoder_hidden_size == 15
    assert RECURRENT(hidden_size=30, encoder_hidden_size=7).encoder_hidden_size == 7
    # What followed is saved, so that it stays when the rest is overridden.
    TRANSFORMER(num_hidden_layers=4).save_pretrained(tmp_path)
    assert TRANSFORMER.from_pretrained(tmp_path, num_hidden_layers=2).num_decoder_layers == 4


def test_a_cache_has_as_many_layers_as_the_decoder():
    config = TRANSFORMER(num_hidden_layers=2, num_decoder_layers=5)
    assert len(DynamicCache(config=config).layers) == 5
    assert config.get_text_config(decoder=True).num_hidden_layers == 5
    assert config.get_text_config(encoder=True).num_hidden_layers == 2
    assert config.get_text_config() is config
    assert config.num_hidden_layers == 2


def test_widths_that_do_not_fit_are_refused():
    sizes = {"vocab_size": 40, "num_hidden_layers": 1, "intermediate_size": 22}
    message = r"`hidden_size` \({}\) must be a multiple of `num_attention_heads` \(4\)"
    with pytest.raises(ValueError, match=message.format(15)):
        RegardDecoderModel(DECODER(**sizes, hidden_size=15, num_attention_heads=4))
    with pytest.raises(ValueError, match=message.format(18)):
        RegardTransformerModel(TRANSFORMER(**sizes, hidden_size=18, num_attention_heads=4))
    with pytest.raises(ValueError, match=r"`hidden_size` \(15\) must be even for sinusoidal positions"):
        RegardTransformerModel(TRANSFORMER(**sizes, hidden_size=15, num_attention_heads=3))


@pytest.mark.parametrize("backbone", [{"model_type": "nope"}, {"hidden_sizes": [3]}, {}])
def test_a_backbone_of_no_known_kind_is_refused(backbone):
    with pytest.raises(ValueError, match=r"^`backbone_config` has the `model_type` ('nope'|None), unknown to"):
        CAPTIONER(backbone_config=backbone)


@pytest.mark.parametrize(
    ("field", "wrong", "allowed"),
    [
        ("decoder_type", "rnn", "recurrent, transformer"),
        ("alignment", "addditive", "additive, bilinear, dot, none, scaled_dot"),
        ("rnn_type", "rnn", "gru, lstm"),
        ("norm_position", "middle", "post, pre"),
    ],
)
def test_a_captioners_choices_are_listed(field, wrong, allowed):
    with pytest.raises(ValueError, match=rf"^`{field}` \('{wrong}'\) must be one of {allowed}"):
        CAPTIONER(**{field: wrong})
