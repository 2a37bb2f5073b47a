"""Any values in any fields of a configuration: it is refused with an error that says so, or makes a model."""

import json
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from regard.configuration.base import NORM_POSITIONS, POSITION_TYPES
from regard.configuration.captioner import DECODER_TYPES, RegardCaptionerConfig
from regard.configuration.recurrent import ALIGNMENT_NAMES, RNN_TYPES
from tests.fuzz.attempts import attempt, attempt_in_a_line
from tests.support.families import FAMILIES

# What a command of ours tells in one line.
REFUSALS = (ValueError, StrictDataclassError)

every_family = pytest.mark.parametrize("config_class", FAMILIES, ids=lambda config_class: config_class.model_type)

numbers = st.one_of(
    st.integers(-2, 9),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, float("nan"), float("inf")]),
)
words = st.one_of(
    st.text(max_size=8),
    st.sampled_from([*ALIGNMENT_NAMES, *RNN_TYPES, *DECODER_TYPES, *NORM_POSITIONS, *POSITION_TYPES, *ACT2FN]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5
)

# Of a model small enough to run. Sizes that are equal could hide one that is taken for another.
TINY = {
    "vocab_size": 13,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 7,
    "max_position_embeddings": 11,
}
BACKBONE = {"model_type": "resnet", "embedding_size": 5, "hidden_sizes": [6], "depths": [1], "layer_type": "basic"}
# What transformers saves or takes besides the fields.
OTHER_KEYS = "model_type torch_dtype num_labels output_attentions attn_implementation auto_map".split()


def names_of(config_class):
    return [field.name for field in fields(config_class)]


def tiny(config_class):
    sizes = {name: value for name, value in TINY.items() if name in names_of(config_class)}
    return sizes | ({"backbone_config": BACKBONE} if config_class is RegardCaptionerConfig else {})


def accepted(config_class, given_fields):
    """The configuration, or None if it is refused as it should be."""
    return attempt(REFUSALS, config_class, **given_fields)[0]


@every_family
@given(data=st.data())
def test_any_value_in_any_field(config_class, data):
    names = st.sampled_from(names_of(config_class))
    given_fields = data.draw(st.dictionaries(names, values, min_size=1, max_size=4))
    accepted(config_class, tiny(config_class) | given_fields)


@every_family
@given(data=st.data())
def test_any_name_of_a_field(config_class, data):
    given_fields = data.draw(st.dictionaries(st.text(max_size=12), values, max_size=2))
    config = accepted(config_class, tiny(config_class) | given_fields)
    if config is not None:
        assert all(config_class.knows(name) for name in given_fields if name != "model_type")


@every_family
@given(data=st.data())
def test_any_config_json(config_class, data, tmp_path_factory):
    """As a folder or the Hub may hold it."""
    folder = tmp_path_factory.mktemp("model")
    names = st.sampled_from([*names_of(config_class), *OTHER_KEYS]) | st.text(max_size=9)
    content = data.draw(st.dictionaries(names, values, max_size=4))
    content = {"model_type": config_class.model_type, **tiny(config_class), **content}
    (folder / "config.json").write_text(json.dumps(content))
    attempt((*REFUSALS, OSError), config_class.from_pretrained, folder)


small = st.integers(1, 6)
shares = st.sampled_from([0, 0.0, 0.1, 0.5, 0.99])
ids = st.integers(0, 12)
SENSIBLE = {
    "hidden_size": st.integers(1, 13),
    "encoder_hidden_size": small,
    "num_hidden_layers": st.integers(1, 2),
    "num_decoder_layers": st.integers(1, 2),
    "num_attention_heads": small,
    "intermediate_size": small,
    "max_position_embeddings": st.integers(1, 11),
    "type_vocab_size": st.integers(1, 3),
    "hidden_act": st.sampled_from(sorted(ACT2FN)),
    "hidden_dropout_prob": shares,
    "attention_probs_dropout_prob": shares,
    "classifier_dropout": shares,
    "label_smoothing": shares,
    "attention_regularization": shares,
    "initializer_range": shares,
    "layer_norm_eps": st.sampled_from([0.0, 1e-12, 1e-5]),
    "alignment": st.sampled_from(ALIGNMENT_NAMES),
    "rnn_type": st.sampled_from(RNN_TYPES),
    "decoder_type": st.sampled_from(DECODER_TYPES),
    "norm_position": st.sampled_from(NORM_POSITIONS),
    "position_embedding_type": st.sampled_from(POSITION_TYPES),
    "scale_embedding": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "use_cache": st.booleans(),
    "freeze_backbone": st.booleans(),
    "chunk_size_feed_forward": st.integers(0, 1),
    "pad_token_id": ids | st.none(),
    "bos_token_id": ids | st.none(),
    "eos_token_id": ids | st.none() | st.lists(ids, max_size=2),
    "sep_token_id": ids | st.none(),
    "decoder_start_token_id": ids,
}


@every_family
@given(data=st.data())
def test_what_is_accepted_makes_a_model_that_runs(config_class, data):
    allowed = {name: SENSIBLE[name] for name in names_of(config_class) if name in SENSIBLE}
    chosen = data.draw(st.fixed_dictionaries({}, optional=allowed))
    config = accepted(config_class, tiny(config_class) | chosen)
    if config is None:
        return
    model_class = data.draw(st.sampled_from(list(FAMILIES[config_class].values())))
    # Sizes that don't suit each other are the affair of the layer that needs them to.
    with torch.device("meta"):
        attempt_in_a_line(ValueError, model_class, config)
    # A model may change its configuration: one more of the same.
    model, _ = attempt_in_a_line(ValueError, model_class, accepted(config_class, tiny(config_class) | chosen))
    if model is None:
        return
    model.eval()
    length = min(3, getattr(config, "max_position_embeddings", 3))
    ids = torch.full((2, 1, length) if "MultipleChoice" in model_class.__name__ else (2, length), 4)
    if config.model_type == "regard_captioner":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "decoder_input_ids": ids}
    else:
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    with torch.inference_mode():
        first = model(**inputs)[0]
    assert first.shape[0] == 2
    if config.layer_norm_eps if hasattr(config, "layer_norm_eps") else True:
        assert first.isfinite().all()
