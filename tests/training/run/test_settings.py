import dataclasses

import pytest
import yaml

from regard.training.families.bert import BERT, BertSettings
from regard.training.run.settings import TrainingSettings, make_settings, to_dict
from regard.training.run.settings_file import read_yaml

NAN, INF = float("nan"), float("inf")


def refusal(values: dict, settings_class: type = BertSettings) -> str:
    """The message of the error that these settings give, which is one line."""
    with pytest.raises(ValueError, match=r".") as raised:
        make_settings(settings_class, values)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# What values may be


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("learning_rate", "1e-4", 1e-4),  # YAML reads it as text
        ("learning_rate", 1, 1.0),
        ("epochs", 2, 2.0),
        ("epochs", "0.5", 0.5),
        ("minutes", None, None),
        ("steps", 5, 5),
        ("validation", 0.1, "0.1"),
        ("validation", "held-out.txt", "held-out.txt"),
        ("data", "a.txt", ["a.txt"]),
        ("data", ["a.txt", "b.txt"], ["a.txt", "b.txt"]),
        ("log_with", "none", ["none"]),
        ("streaming", True, True),
        ("tokenizer", None, None),
        ("config", {"hidden_size": 64}, {"hidden_size": 64}),
    ],
)
def test_values_are_taken_as_their_type(name, given, taken):
    value = getattr(make_settings(BertSettings, {name: given}), name)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("steps", "many", "`steps` ('many') must be a whole number"),
        ("steps", "10", "`steps` ('10') must be a whole number"),
        ("steps", 1.5, "`steps` (1.5) must be a whole number"),
        ("steps", True, "`steps` (True) must be a whole number"),
        ("seed", None, "`seed` (None) must be a whole number"),
        ("learning_rate", "fast", "`learning_rate` ('fast') must be a number"),
        ("learning_rate", 10**400, "`learning_rate` (1000"),
        ("learning_rate", False, "`learning_rate` (False) must be a number"),
        ("dropout", None, "`dropout` (None) must be a number"),
        ("schedule", None, "`schedule` (None) must be text"),
        ("schedule", ["linear"], "`schedule` (['linear']) must be text"),
        ("precision", True, "`precision` (True) must be text"),  # YAML reads `no` so
        ("next_sentence", "yes", "`next_sentence` ('yes') must be true or false"),
        ("next_sentence", 1, "`next_sentence` (1) must be true or false"),
        ("data", 5, "`data` (5) must be a list"),
        ("data", {"a": 1}, "`data` ({'a': 1}) must be a list"),
        ("data", [5], "`data` ([5]) must be a list of text"),
        ("log_with", [None], "`log_with` ([None]) must be a list of text"),
        ("config", ["hidden_size=3"], "`config` (['hidden_size=3']) must be a mapping"),
        ("config", None, "`config` (None) must be a mapping"),
        ("config", {1: 2}, "`config` ({1: 2}) must be a mapping"),
    ],
)
def test_values_of_another_type(name, given, expected):
    assert refusal({name: given}).startswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("learning_rat", "there is no setting `learning_rat`: did you mean `learning_rate`?"),
        ("batch-size", "there is no setting `batch-size`: did you mean `batch_size`?"),
        ("mask_prob", "there is no setting `mask_prob`: did you mean `mask_rate`?"),
        ("\n", r"there is no setting `'\n'`: the"),
        (5, "there is no setting `5`: the settings are accumulation, bad_records, batch_size, clip, "),
    ],
)
def test_names_that_are_no_setting(name, expected):
    assert refusal({name: 1}).startswith(expected)


def test_a_setting_of_another_family():
    assert "there is no setting `mask_rate`" in refusal({"mask_rate": 0.2}, TrainingSettings)


# What values must be, besides their type

OUT_OF_RANGE = [
    *(
        (name, value)
        for name in ("steps", "batch_size", "accumulation", "log_every", "keep_last")
        for value in (0, -1)
    ),
    *((name, value) for name in ("max_documents", "evaluation_batches") for value in (0, -1)),
    *((name, -1) for name in ("workers", "evaluate_every", "save_every", "seed")),
    *((name, value) for name in ("epochs", "minutes", "learning_rate") for value in (0.0, -1.0, NAN, INF)),
    *((name, value) for name in ("weight_decay", "clip") for value in (-1.0, NAN, INF)),
    *((name, value) for name in ("warmup", "short_seq_prob", "mask_rate", "dropout") for value in (-0.1, 1.1, NAN)),
    ("mask_rate", 0.0),
    ("dropout", 1.0),
    ("seed", 2**32),
    ("workers", 513),
    ("max_length", 2**31),
    ("batch_size", 2**63),
    ("schedule", "polynomial"),
    ("precision", "fp8"),
    ("size", "huge"),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_values_out_of_range(name, value):
    assert refusal({name: value}).startswith(f"`{name}` ({value!r}) must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 1) for name in ("steps", "batch_size", "accumulation", "log_every", "keep_last", "max_documents")),
        *((name, 0) for name in ("workers", "evaluate_every", "save_every", "seed", "weight_decay", "clip")),
        *((name, value) for name in ("warmup", "short_seq_prob") for value in (0, 1)),
        *((name, 1e-9) for name in ("epochs", "minutes", "learning_rate", "mask_rate")),
        ("mask_rate", 1),
        ("dropout", 0),
        ("seed", 2**32 - 1),
        ("evaluation_batches", 1),
    ],
)
def test_the_limits_themselves_are_allowed(name, value):
    assert getattr(make_settings(BertSettings, {name: value}), name) == value


@pytest.mark.parametrize("given", [("steps", "epochs"), ("steps", "minutes"), ("epochs", "minutes")])
def test_two_ends_of_a_run(given):
    assert refusal(dict.fromkeys(given, 1)).startswith(
        f"`{given[0]}` and `{given[1]}` both give the length of the run"
    )


def test_choices_are_listed():
    assert refusal({"size": "huge"}).endswith("must be one of tiny, mini, small, medium, base, large")


def test_defaults_are_within_their_own_limits_and_not_shared():
    settings = BertSettings()
    assert to_dict(make_settings(BertSettings, to_dict(settings))) == to_dict(settings)
    settings.config["hidden_size"] = 1
    settings.data.append("more")
    assert BertSettings().config == {}
    assert BertSettings().data == ["python-docs"]


def test_every_setting_is_explained():
    for setting in dataclasses.fields(BertSettings):
        assert setting.metadata["help"].endswith(".")


# Files


def test_settings_from_a_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "# ours\ndata: [a.txt, 中.txt]\nlearning_rate: 1e-4\nconfig:\n  hidden_size: 64\n", encoding="utf-8"
    )
    settings = make_settings(BertSettings, read_yaml(file))
    assert settings.data == ["a.txt", "中.txt"]
    assert settings.learning_rate == 1e-4
    assert settings.config == {"hidden_size": 64}


@pytest.mark.parametrize("content", ["", "# nothing\n"])
def test_an_empty_file_sets_nothing(tmp_path, content):
    (tmp_path / "settings.yaml").write_text(content)
    assert read_yaml(tmp_path / "settings.yaml") == {}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"steps: 5\nsize: [tiny\n", r"settings\.yaml, line 3 is not YAML: .*"),
        (b"steps: 5\n\tsize: tiny\n", r"settings\.yaml, line 2 is not YAML: .*"),
        (b"steps: \x00", r"settings\.yaml.* is not YAML: .*"),
        (b"steps: !!python/object:os.system 5\n", r"settings\.yaml, line 1 is not YAML: .*"),
        (b"- steps\n", r"settings\.yaml must hold settings as `name: value`, but it holds a list"),
        (b"steps", r"settings\.yaml must hold settings as `name: value`, but it holds a str"),
        (b"size: \xff\n", r"settings file .*settings\.yaml can't be read: .*"),
    ],
)
def test_files_that_hold_no_settings(tmp_path, content, expected):
    (tmp_path / "settings.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=expected + "$") as raised:
        read_yaml(tmp_path / "settings.yaml")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml can't be read: .*No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_the_bare_word_no_of_yaml_is_the_word():
    assert make_settings(BertSettings, yaml.safe_load("precision: no")).precision == "no"


@pytest.mark.parametrize(
    "content",
    ["x: 2020-99-99", "x: !!timestamp 5", "x: !!bool 5", "x: !!int ''", "x: 1" + "0" * 5_000, "[" * 5_000],
    ids=["date", "timestamp", "truth value", "number", "long number", "nested"],
)
def test_what_yaml_itself_stumbles_over(tmp_path, content):
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"settings\.yaml holds a value that YAML can't read: ") as raised:
        read_yaml(tmp_path / "settings.yaml")
    assert "\n" not in str(raised.value)


def test_a_width_beyond_any():
    """It is the configuration that says so, but the learning rate is computed from it before."""
    settings = make_settings(BertSettings, {"config": {"hidden_size": 10**400}})
    with pytest.raises(ValueError, match=r"`hidden_size` \(10+\) must be less than 2\*\*31"):
        BERT.make_config(settings)
