import json

import pytest
import yaml

import regard
from regard.commands.plan import plan_lines
from regard.commands.settings_options import settings_options
from regard.training.families.recipes import TRAINABLE
from regard.training.planning.plan import plan_training

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 56}
TINY = {
    "bert": {"vocab_size": 501, "max_length": 31, "batch_size": 12, "config": SIZES},
    "decoder": {"vocab_size": 301, "max_length": 37, "batch_size": 12, "config": SIZES},
    "transformer": {"max_length": 19, "batch_size": 12, "config": SIZES},
    "recurrent": {"max_length": 13, "batch_size": 12, "config": {"hidden_size": 26}},
    "captioner": {"max_length": 7, "image_size": 40, "batch_size": 12, "config": {"hidden_size": 28}},
}


@pytest.mark.parametrize("family", TRAINABLE)
def test_the_command_tells_what_the_function_does(command, flags, family):
    line = ["plan", family, *flags(TINY[family]), "--devices", "2", "--tokens", "5e6", "--speed", "3000"]
    made = plan_training(family, TINY[family], devices=2, tokens=5e6, speed=3000)
    told = command(*line, "--json")
    assert told.code == 0
    assert json.loads(told.out) == json.loads(json.dumps(made.to_dict()))
    ended = command(*line)
    assert ended.code == 0
    assert ended.out.splitlines() == plan_lines(made)


def test_what_people_are_told():
    lines = plan_lines(regard.plan_training("bert", TINY["bert"], tokens=7200 * 500, speed=500))
    text = "\n".join(lines)
    for part in (
        "RegardBertForPreTraining, 501 tokens in its vocabulary",
        "12 examples, 372 tokens a step; the device computes 12 at once in float32",
        "3,600,000 tokens, 9,678 steps, ",
        "500 tokens a second (given), ",
        "2.0 hours",
    ):
        assert part in text
    for name in ("weights", "gradients", "optimizer", "activations", "at most at once"):
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    assert "communication" not in text
    assert "Note" not in text


def test_what_people_are_told_of_several_devices():
    text = "\n".join(plan_lines(plan_training("captioner", TINY["captioner"], devices=3, speed=500, efficiency=0.8)))
    for part in ("12 images", "a device computes 4 at once", "of each of 3 ", "communication", "keeps 80% of it"):
        assert part in text
    assert "Note: the tokenizer is made from the data; a vocabulary of 1,024 tokens is assumed" in text


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(86400, "1.0 days"), (86399, "24.0 hours"), (3600, "1.0 hours"), (60, "1.0 minutes"), (0.25, "0.2 seconds")],
)
def test_a_time_is_told_in_the_largest_unit_that_it_fills(seconds, told):
    lines = plan_lines(plan_training("bert", TINY["bert"], tokens=seconds * 4000, speed=4000))
    assert lines[-1].split(maxsplit=1) == ["Time", told]


def test_what_is_not_trained_is_told():
    made = plan_training("captioner", {**TINY["captioner"], "freeze_backbone": True})
    (line,) = (line for line in plan_lines(made) if line.startswith("Parameters"))
    assert line.endswith(f"; {made.parameters.backbone:,} are not trained")


def test_the_steps_of_the_command_line(command, flags):
    made = json.loads(command("plan", "bert", *flags(TINY["bert"]), "--steps", "7", "--json").out)
    assert (made["steps"], made["tokens"]) == (7, 7 * 12 * 31)


def test_time_without_a_speed():
    assert any("--speed" in line and "--measure" in line for line in plan_lines(plan_training("bert", TINY["bert"])))


def test_a_measured_speed(command, flags, monkeypatch):
    monkeypatch.setattr("regard.training.planning.trial_step.SECONDS", 0)
    ended = command("plan", "decoder", *flags(TINY["decoder"]), "--measure")
    assert ended.code == 0
    assert "measured here" in ended.out


def test_the_settings_of_a_run_are_those_of_its_plan(command, tiny, tmp_path):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({**tiny, "learning_rate": 0.002}))
    given = ["plan", "bert", "--settings", tmp_path / "settings.yaml", "--json"]
    made = json.loads(command(*given).out)
    assert (made["steps"], made["max_length"], made["batch_size"]) == (4, 32, 8)
    changed = json.loads(command(*given, "--batch-size", "2", "--config", "hidden_size=16").out)
    assert (changed["steps"], changed["max_length"], changed["batch_size"]) == (4, 32, 2)
    assert changed["parameters"]["total"] < made["parameters"]["total"]


@pytest.mark.parametrize("family", TRAINABLE)
def test_help(command, family):
    ended = command("plan", family, "--help")
    assert ended.code == 0
    text = " ".join(ended.out.split())
    for flag in ("--devices", "--tokens", "--speed", "--measure", "--efficiency", "--json"):
        assert flag in text
    planned = set(TRAINABLE[family].settings_class.planned)
    for option in settings_options(TRAINABLE[family].settings_class):
        flag = "--" + option.name.replace("_", "-")
        assert (f"{flag} " in text or f"{flag} / " in text) == (option.name in planned | {"settings"})


@pytest.mark.parametrize("family", TRAINABLE)
def test_what_matters_is_a_setting(family):
    settings_class = TRAINABLE[family].settings_class
    names = {option.name for option in settings_options(settings_class)}
    assert names > set(settings_class.planned)


def test_bad_use(refusal, flags, tmp_path):
    line = ["plan", "bert", *flags(TINY["bert"])]
    assert "`devices` (0) must be at least 1" in refusal(*line, "--devices", "0")
    assert "`batch_size` (12) must be a multiple of 5" in refusal(*line, "--devices", "5")
    assert "`sharding` ('half') must be one of none, fsdp" in refusal(*line, "--sharding", "half")
    assert "`speed` (5) is given, and `measure`" in refusal(*line, "--speed", "5", "--measure")
    assert "`tokens` (-1) must be more than 0" in refusal(*line, "--tokens", "-1")
    assert "`size` ('huge') must be one of tiny" in refusal("plan", "bert", "--size", "huge")
    assert "did you mean `hidden_size`" in refusal("plan", "bert", "--config", "hiden_size=16")
    assert "can't be read" in refusal("plan", "bert", "--settings", tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"`family` \('gpt'\) must be one of bert, decoder"):
        plan_training("gpt")
