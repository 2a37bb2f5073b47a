import inspect
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
import yaml

import regard.commands.app
from regard.commands.generate import generate_text
from regard.commands.settings_options import settings_command
from regard.commands.train import figure_lines
from regard.families.registry import FAMILIES
from regard.training.families.bert import BertObjective, BertSettings
from regard.training.families.recipes import TRAINABLE

ROOT = Path(__file__).parents[3]


# Help


def test_help(command):
    for arguments in ([], ["--help"]):
        ended = command(*arguments)
        for name in ("train", "fill", "generate", "evaluate"):
            assert name in ended.out + ended.err
    assert command("--help").code == 0


@pytest.mark.parametrize("family", TRAINABLE)
def test_help_explains_every_setting(command, family):
    ended = command("train", family, "--help")
    assert ended.code == 0
    text = " ".join(ended.out.split())
    assert FAMILIES[family].help in text
    for setting in fields(TRAINABLE[family].settings_class):
        flag = "--" + setting.name.replace("_", "-")
        assert flag in text
        # A line may end at a hyphen.
        assert "".join(setting.metadata["help"].split()) in "".join(text.split())
    for own in ("--output", "--resume", "--settings", f"[default: runs/{family}]"):
        assert own in text


def test_help_tells_defaults_and_choices(command):
    text = " ".join(command("train", "bert", "--help").out.split())
    for shown in ("[default: python-docs]", "[default: 0.15]", "[default: tiny]", "NAME=VALUE", "--no-lowercase"):
        assert shown in text
    text = " ".join(command("train", "recurrent", "--help").out.split())
    for shown in ("[default: dates]", "[default: additive]", "[default: gru]", "[default: 224]", "[default: 0.0]"):
        assert shown in text


def test_help_names_every_family(command):
    ended = command("train", "--help")
    for family in TRAINABLE:
        assert f"{family} " in ended.out
        assert FAMILIES[family].help.partition(":")[0].rstrip(".") in " ".join(ended.out.split())


@pytest.mark.parametrize("name", ["fill", "generate", "evaluate"])
def test_help_explains_every_option(command, name):
    ended = command(name, "--help")
    assert ended.code == 0
    text = " ".join(ended.out.split())
    parameters = typer.main.get_command(regard.commands.app.app).commands[name].params
    assert len(parameters) > 2
    for parameter in parameters:
        assert parameter.help
        assert " ".join(parameter.help.split()) in text
        assert all(flag in text for flag in parameter.opts)


def test_generating_has_the_options_and_defaults_of_the_function():
    command, function = (inspect.signature(made).parameters for made in (regard.commands.app.generate, generate_text))
    assert {name: own.default for name, own in command.items()} == {
        name: own.default for name, own in function.items()
    }


def test_version(command):
    assert command("--version").out.strip() == f"regard {regard.__version__}"


# Training


def test_a_run_from_flags(command, flags, tmp_path):
    ended = command("train", "bert", *flags(), "--no-next-sentence", "--whole-words", "--output", tmp_path / "run")
    assert ended.code == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["settings"]["next_sentence"], results["settings"]["whole_words"]) == (False, True)
    assert results["settings"]["lowercase"]
    assert results["architecture"] == "RegardBertForMaskedLM"
    for part in (
        "Trained for 4 steps",
        "masked tokens predicted right",
        "To load it, in Python:",
        "AutoModelForMaskedLM",
    ):
        assert part in ended.out
    assert "next sentences told" not in ended.out
    assert (tmp_path / "run" / "model" / "README.md").exists()


@pytest.mark.parametrize(
    ("family", "architecture", "shown"),
    [
        ("decoder", "RegardDecoderForCausalLM", "AutoModelForCausalLM"),
        ("transformer", "RegardTransformerForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("recurrent", "RegardRecurrentForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ],
)
def test_a_run_of_each_generating_family(command, flags, tiny_of, tmp_path, family, architecture, shown):
    line = ["train", family, *flags(tiny_of(family), steps=3, dropout=0.25), "--output", tmp_path / "run"]
    ended = command(*line)
    assert ended.code == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["family"], results["architecture"], results["step"]) == (family, architecture, 3)
    assert results["settings"]["dropout"] == 0.25
    for part in ("Trained for 3 steps", "To load it, in Python:", shown, *figure_lines(results)):
        assert part in ended.out
    assert (tmp_path / "run" / "model" / "README.md").exists()
    again = command(*line, "--resume")
    assert again.code == 0
    assert "has already ended" in again.out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"alignment": "additive", "rnn_type": "gru"}),
        ({"alignment": "none", "rnn_type": "lstm"}, {"alignment": "none", "rnn_type": "lstm"}),
    ],
)
def test_flags_of_the_recurrent_family(command, flags, tiny_pairs, tmp_path, given, expected):
    line = flags(tiny_pairs, steps=1, **given)
    assert command("train", "recurrent", *line, "--output", tmp_path / "run").code == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert {name: config[name] for name in expected} == expected


def test_a_run_from_a_file_with_flags_before_it(command, tiny, tmp_path):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({**tiny, "seed": 5, "learning_rate": 0.002}))
    given = ["--settings", tmp_path / "settings.yaml", "--seed", "7", "--config", "hidden_size=16", "--lowercase"]
    assert command("train", "bert", *given, "--output", tmp_path / "run").code == 0
    settings = json.loads((tmp_path / "run" / "results.json").read_text())["settings"]
    assert (settings["seed"], settings["learning_rate"]) == (7, 0.002)
    # Fields of the configuration are joined one by one.
    assert settings["config"] == {**tiny["config"], "hidden_size": 16}
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"]) == (16, 48)


def test_flags_and_a_file_make_the_same_run(command, flags, tiny, tmp_path):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(tiny))
    assert command("train", "bert", *flags(), "--output", tmp_path / "a").code == 0
    assert command("train", "bert", "--settings", tmp_path / "settings.yaml", "--output", tmp_path / "b").code == 0
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_going_on(command, flags, refusal, tmp_path):
    output = ["--output", tmp_path / "run"]
    assert command("train", "bert", *flags(), *output, "--resume").code == 0
    before = (tmp_path / "run" / "results.json").read_bytes()
    assert "holds another run: choose another folder, or `resume`" in refusal("train", "bert", *flags(), *output)
    ended = command("train", "bert", *output, "--resume")
    assert ended.code == 0
    assert "has already ended" in ended.out
    other = ["train", "bert", *output, "--resume", "--steps", "9"]
    assert "`steps` was 4, not 9" in refusal(*other)
    assert "has already ended, and can't go on with other settings" in refusal(*other, "--accept-changes")
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def test_going_on_with_other_settings(command, flags, refusal, tmp_path):
    line = ["train", "bert", *flags(), "--output", tmp_path / "run", "--resume"]
    assert command(*line, "--save-every", "2").code == 0
    (tmp_path / "run" / "results.json").unlink()
    assert "(`accept_changes` allows it): `steps` was 4, not 5" in refusal(*line, "--steps", "5")
    done = command(*line, "--steps", "5", "--accept-changes")
    assert done.code == 0
    assert "goes on from step 4 with what it did not begin with: `steps` was 4, not 5" in done.out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["step"] == 5
    assert results["accepted_changes"] == [{"step": 4, "changes": ["`steps` was 4, not 5"]}]


def test_numbers_that_are_not_finite_end_in_one_line(flags, refusal, tmp_path, monkeypatch):
    whole = BertObjective.forward

    def spoilt(self, model, batch, **counts):
        output = whole(self, model, batch, **counts)
        output.loss = output.loss * math.nan
        return output

    monkeypatch.setattr(BertObjective, "forward", spoilt)
    told = refusal("train", "bert", *flags(), "--output", tmp_path / "run")
    assert "the loss or its gradient was not finite at step 1 (epoch 0, examples 0 to " in told


def test_only_the_first_of_several_processes_speaks(command, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    command("--version")  # eager: the logger is set up by commands alone
    monkeypatch.setenv("RANK", "1")
    command("fill", "no mask", "--model", tmp_path)
    assert logging.getLogger("regard").level == logging.ERROR
    monkeypatch.setenv("RANK", "0")
    command("fill", "no mask", "--model", tmp_path)
    assert logging.getLogger("regard").level == logging.INFO


def test_a_duration_given_as_a_flag_goes_before_another_in_the_file(tmp_path):
    seen = []
    command = settings_command(BertSettings, lambda output, chosen, resume: seen.append(chosen), "runs")
    file = tmp_path / "settings.yaml"
    file.write_text("steps: 5\nseed: 3\n")
    command(output=tmp_path, resume=False, settings=file, epochs=2.0)
    command(output=tmp_path, resume=False, settings=file, batch_size=4)
    assert seen == [{"seed": 3, "epochs": 2.0}, {"steps": 5, "seed": 3, "batch_size": 4}]


# Training that cannot be


def text_file(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def corpora(folder: Path) -> dict[str, dict]:
    """Settings whose data cannot be trained on."""
    files = {
        "empty": text_file(folder, "empty.txt", ""),
        "one": text_file(folder, "one.txt", "One document. It has two sentences."),
        "latin": text_file(folder, "latin.txt", "A good line.\nCaf\xe9.".encode("latin-1")),
        "broken": text_file(folder, "broken.jsonl", '{"text": "One."}\n{"text": "Two."}\n{"text": \n'),
        "column": text_file(folder, "column.csv", "title,body\nOne,Two\n"),
        "single": text_file(folder, "single.txt", "\n\n".join(["One sentence."] * 10)),
        "bare": str(folder / "bare"),
    }
    (folder / "bare").mkdir()
    return {name: {"data": [file]} for name, file in files.items()}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("empty", {}, "the corpus is empty: no text in"),
        ("one", {}, "too few to hold out 2 and train on 2 or more: add documents, split"),
        ("latin", {}, "latin.txt' is not UTF-8: byte 16 (0xe9)"),
        ("broken", {}, "broken.jsonl:3 does not parse as JSON"),
        ("column", {}, "has no column 'text'; `text_column` can be 'title', 'body'"),
        ("column", {"text_column": "titel"}, "has no column 'titel'; `text_column` can be 'title', 'body'"),
        ("single", {"documents": "blank-line"}, "no document has two sentences to make a pair of"),
        ("bare", {}, "holds no file that ends in"),
        (None, {"data": ["nowhere.txt"]}, "`data` ('nowhere.txt') is not 'python-docs', a file, a folder, a glob"),
        (None, {"data": ["nowhere/*.txt"]}, "is a glob that matches no file"),
        (None, {"documents": "page"}, "`documents` ('page') must be one of 'file', 'blank-line', 'line'"),
        (None, {"validation": "nowhere.txt"}, "('nowhere.txt') is not"),
        (None, {"validation": "7"}, "`validation` (7) must be a share between 0 and 1"),
        (None, {"max_length": 33}, "`max_length` (33) is more than `max_position_embeddings` (32)"),
        (None, {"max_length": 4}, "`max_length` (4) must be at least 5"),
        (None, {"config": {"hidden_size": 30, "num_attention_heads": 4}}, "`hidden_size` (30) must be a multiple of"),
        (None, {"config": {"hiden_size": 64}}, "has no field `hiden_size`: did you mean `hidden_size`?"),
        (None, {"config": {"hidden_size": "wide"}}, "'hidden_size' expected int, got str"),
        (None, {"config": {"hidden_size": "[1"}}, "`config` ('hidden_size=[1') has a value that is not YAML"),
        (
            None,
            {"config": {"hidden_size": "!!bool 1"}},
            "`config` ('hidden_size=!!bool 1') has a value that is not YAML",
        ),
        (None, {"config": {"hidden_size": 0}}, "`hidden_size` (0) must be at least 1"),
        (None, {"config": ["hidden_size"]}, "`config` ('hidden_size') must be NAME=VALUE"),
        (None, {"size": "huge"}, "`size` ('huge') must be one of tiny, mini, small"),
        (None, {"steps": -4}, "`steps` (-4) must be more than 0"),
        (None, {"steps": None, "epochs": -0.5}, "`epochs` (-0.5) must be more than 0"),
        (None, {"batch_size": -8}, "`batch_size` (-8) must be at least 1"),
        (None, {"batch_size": 5_000}, "fewer than one batch (`batch_size` 5000)"),
        (None, {"learning_rate": "nan"}, "`learning_rate` (nan) must be a finite number"),
        (None, {"seed": -1}, "`seed` (-1) must be at least 0"),
        (None, {"epochs": 1}, "`steps` and `epochs` both give the length of the run"),
        (None, {"precision": "fp4"}, "`precision` ('fp4') must be one of no, bf16, fp16"),
        (None, {"vocab_size": 6}, "`vocab_size` (6) must be at least"),
        (None, {"tokenizer": "./nowhere"}, "nowhere"),
        (None, {"log_with": ["nonsense"]}, "nonsense"),
        (None, {"settings": "nowhere.yaml"}, "the settings file nowhere.yaml can't be read"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(refusal, flags, tmp_path, name, given, expected):
    given = {**(corpora(tmp_path)[name] if name else {}), **given}
    assert expected in refusal("train", "bert", *flags(**given), "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [
        ("decoder", {"max_length": 33}, "`max_length` (33) is more than `max_position_embeddings` (32)"),
        ("decoder", {"max_length": 1}, "`max_length` (1) must be at least 2"),
        ("decoder", {"vocab_size": 99}, "`vocab_size` (99) must be at least 260"),
        ("decoder", {"dropout": 1}, "`dropout` (1.0) must be at least 0 and less than 1"),
        ("decoder", {"data": ["nowhere.txt"]}, "`data` ('nowhere.txt') is not 'python-docs'"),
        ("decoder", {"config": {"alignment": "dot"}}, "has no field `alignment`"),
        ("transformer", {"units": "syllables"}, "`units` ('syllables') must be one of characters, pieces"),
        ("transformer", {"source_column": "sauce"}, "has no column 'sauce'"),
        ("transformer", {"max_length": 1}, "`max_length` (1) must be at least 2"),
        ("transformer", {"beams": 0}, "`beams` (0) must be at least 1"),
        ("transformer", {"config": {"hidden_size": 30}}, "`hidden_size` (30) must be a multiple of"),
        ("recurrent", {"alignment": "sideways"}, "`alignment` ('sideways') must be one of dot"),
        ("recurrent", {"rnn_type": "rnn"}, "`rnn_type` ('rnn') must be one of gru, lstm"),
        ("recurrent", {"batch_size": 5_000}, "fewer than one batch (`batch_size` 5000)"),
    ],
)
def test_a_mistake_of_each_family_is_told_in_one_line(refusal, flags, tiny_of, tmp_path, family, given, expected):
    line = flags(tiny_of(family), **given)
    assert expected in refusal("train", family, *line, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stepz: 5", "there is no setting `stepz`: did you mean `steps`?"),
        ("steps: five", "`steps` ('five') must be a whole number"),
        ("steps: [5", "settings.yaml, line 1 is not YAML"),
        ("- steps", "must hold settings as `name: value`"),
        ("config: 5", "`config` (5) must be a mapping"),
        ("config:", "`config` (None) must be a mapping"),
        ("config: {1: 2}", "`config` ({1: 2}) must be a mapping"),
        ("data: [1]", "`data` ([1]) must be a list of text"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--config", "hidden_size=64"]])
def test_a_mistake_in_a_settings_file(refusal, tmp_path, content, expected, more):
    (tmp_path / "settings.yaml").write_text(content)
    given = ["--settings", tmp_path / "settings.yaml", *more, "--output", tmp_path / "run"]
    if more and content.startswith("config: {"):
        expected = "must be a mapping"  # of which the flag is a part
    assert expected in refusal("train", "bert", *given)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_mask(refusal, flags, tmp_path, run_folder):
    from transformers import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(run_folder / "tokenizer")
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = flags(tokenizer=tmp_path / "tokenizer")
    assert "has no mask token, which is needed" in refusal("train", "bert", *given, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_else_is_left_as_it_is(refusal, flags, tmp_path):
    (tmp_path / "thesis.txt").write_text("my only copy")
    for more in ([], ["--resume"]):
        line = refusal("train", "bert", *flags(), "--output", tmp_path, *more)
        assert "holds something other than a run: choose another folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unknown_family(command):
    ended = command("train", "gpt")
    assert ended.code == 2
    assert "No such command 'gpt'" in ended.err


@pytest.mark.parametrize(("flag", "value"), [("--stepz", "5"), ("--steps", "five")])
def test_flags_that_are_none(command, tmp_path, flag, value):
    ended = command("train", "bert", flag, value, "--output", tmp_path / "run")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("Error: ")
    assert flag in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_in_a_real_process(tmp_path, flags):
    text_file(tmp_path, "latin.txt", "Caf\xe9".encode("latin-1"))
    given = flags(data=[tmp_path / "latin.txt"])
    environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "regard", "train", "bert", *given, "--output", str(tmp_path / "run")]
    ended = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert "latin.txt' is not UTF-8: byte 3 (0xe9)" in ended.stderr
