"""Settings files of any content, and any values of settings: they are taken or refused in one line."""

import dataclasses
import typing

import pytest
import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from hypothesis import example, given
from hypothesis import strategies as st

from regard.training.families.recipes import TRAINABLE
from regard.training.finetuning.settings import FinetuneSettings
from regard.training.run.folder import open_run, save_settings
from regard.training.run.settings import make_settings, to_dict
from regard.training.run.settings_file import read_yaml
from tests.fuzz.attempts import attempt, attempt_in_a_line

SETTINGS = {name: family.settings_class for name, family in TRAINABLE.items()} | {"finetune": FinetuneSettings}
every_class = pytest.mark.parametrize("settings_class", SETTINGS.values(), ids=SETTINGS)

words = st.sampled_from("tiny linear cosine no bf16 none 0.1 1e-4 nan inf -1 additive gru pieces".split())
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(-(2**80), 2**80),
    st.just(10**400),
    st.floats(),
    words,
    st.text(max_size=6),
    st.dates(),
    st.binary(max_size=3),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=5
)
# Each is well-formed or not, and stands for something or not, in a way of its own.
LINES = r"""
a: b|- a|? [a, b]|&a [*a]|<<: *a|a: &a {b: *a}|!!python/object:os.system {}|!!set {a}|steps: 5|a: !!binary eA==
{[1]: 2}|{{a: b}: c}|%YAML 9|---|...|a: '|1: 2|x: 2020-99-99|x: !!timestamp 5|x: !!int x|x: !!float y|x: 0x_
x: 1:99:99|=: 1|- - -|a: |||  b
"""
lines = st.sampled_from([*LINES.replace("\n", "|").split("|"), "\t", "\x07"])


def names_of(settings_class):
    return [field.name for field in dataclasses.fields(settings_class)]


@every_class
@given(data=st.data())
def test_any_values(settings_class, data):
    names = st.sampled_from(names_of(settings_class)) | st.text(max_size=5) | scalars.filter(lambda name: name != "")
    given_values = data.draw(st.dictionaries(names, values, max_size=4))
    settings, _ = attempt_in_a_line(ValueError, make_settings, settings_class, given_values)
    if settings is None:
        return
    hints = typing.get_type_hints(settings_class)
    for name, value in to_dict(settings).items():
        kinds = typing.get_args(hints[name]) if type(None) in typing.get_args(hints[name]) else (hints[name],)
        assert type(value) in [typing.get_origin(kind) or kind for kind in kinds], name


@every_class
@given(data=st.data())
def test_what_is_taken_is_the_same_once_it_was_written(settings_class, data, tmp_path_factory):
    names = st.sampled_from(names_of(settings_class))
    given_values = data.draw(st.dictionaries(names, scalars | st.lists(words, max_size=2), min_size=1, max_size=2))
    settings, _ = attempt_in_a_line(ValueError, make_settings, settings_class, given_values)
    if settings is not None:
        folder = tmp_path_factory.mktemp("run")
        save_settings(folder, "x", settings)
        assert open_run(folder, settings_class, "x", {}, resume=True) == settings


@given(
    content=st.one_of(
        values.map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode()),
        st.lists(lines | st.text(max_size=6), max_size=4).map(
            lambda parts: "\n".join(parts).encode("utf-8", "replace")
        ),
        st.binary(max_size=20),
    )
)
@example(content=b"[" * 5_000)
@example(content=b"a: &a {b: *a}")
@example(content=b"x: 2020-99-99")
@example(content=b"x: !!timestamp 5")
@example(content=b"x: !!bool 5")
@example(content=b"steps: " + b"1" * 5_000)
def test_any_file(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("settings") / "settings.yaml"
    file.write_bytes(content)
    found, message = attempt_in_a_line(ValueError, read_yaml, file)
    if found is None:
        assert str(file) in message
    else:
        for settings_class in SETTINGS.values():
            attempt_in_a_line(ValueError, make_settings, settings_class, found)


@pytest.mark.parametrize("family", TRAINABLE.values(), ids=TRAINABLE)
@given(data=st.data())
def test_any_fields_of_the_configuration(family, data):
    """What a run begins with, before it reads any data."""
    fields = st.sampled_from("hidden_size vocab_size num_attention_heads alignment hidden_act eos_token_id".split())
    config = data.draw(st.dictionaries(fields | st.text(max_size=4), st.integers(-2, 40) | words | values, max_size=2))
    settings, _ = attempt_in_a_line(ValueError, make_settings, family.settings_class, {"config": config})
    if settings is not None:
        with torch.device("meta"):
            attempt((ValueError, StrictDataclassError), family.make_model, settings)
