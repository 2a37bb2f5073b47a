"""Values that no one means, for every option of every command: each is taken, or refused in one line."""

import json
import random
from functools import cache

import pytest
import typer.main

import regard.commands.app
import regard.loading
from tests.support.thorough import chosen, one_or_all

LONG = "x" * 5_000
INTEGERS = ["-1", "0", str(10**30), "nan", "", "1.5"]
FLOATS = ["nan", "inf", "-inf", "", "-1", "5e-324"]
PATHS = ["missing", "folder", "", "a\0b", LONG, "broken", "noise", "folder/a\nb", "\udc80"]
TEXTS = ["", " ", "\udc80", "a\nb", LONG, "../..", "\U0001f600", "nan", "folder", "broken", "noise"]
PAIRS = ["", "=", "a", "a=b", "hidden_size=[", f"hidden_size={10**30}", "\udc80=1", "a\nb=1", "x=!!python/name:os.x"]


def leaves(command, path=()):
    """The commands that do something, with the words that name them."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield " ".join(path), command


APP = typer.main.get_command(regard.commands.app.app)
COMMANDS = dict(leaves(APP))

# What the commands are given beside the value in question; the capitals stand for folders and files.
GIVEN = {
    "fill": {"text": "a [MASK] cat", "model": "BERT"},
    "generate": {"prompt": "a cat", "model": "DECODER", "max_new_tokens": "2"},
    "evaluate": {"model": "DECODER", "data": "CORPUS", "batches": "1", "setting": "max_length=16"},
    "export": {"model": "BERT", "output": "OUTPUT"},
    "push": {"run": "BERT", "repo": "me/x"},
    "inspect attention": {"model": "BERT", "output": "a.svg", "text": "a red cat"},
    "inspect faithfulness": {"model": "DECODER", "output": "a.png", "data": "CORPUS", "examples": "2"},
    "inspect marks": {"model": "CAPTIONER", "output": "a.png", "examples": "1"},
    "inspect shapes": {"model": "BERT", "text": "a red cat"},
    "inspect calculation": {"query": "1 0", "keys": "1 0; 0 1"},
    "inspect causality": {"model": "DECODER", "text": "a red cat"},
    "inspect order": {"model": "BERT", "text": "a red cat"},
    "inspect heads": {"model": "BERT", "text": "a red cat", "output": "a.png"},
    "inspect senses": {"model": "BERT", "word": "cat", "data": "CORPUS", "output": "a.png"},
}
DATA = {"bert": "CORPUS", "decoder": "CORPUS", "transformer": "ROWS", "recurrent": "ROWS", "captioner": "IMAGES"}


def given_to(name):
    group, _, kind = name.partition(" ")
    if group == "train":
        return {"data": DATA[kind], "output": "OUTPUT"}
    if group == "finetune":
        return {"data": "ROWS", "model": "BERT", "output": "OUTPUT"}
    return GIVEN.get(name, {})


def values_for(parameter):
    """What no one means, by the type of an option; a switch has no value."""
    if parameter.metavar == "NAME=VALUE":
        return PAIRS
    kind = str(parameter.type_descriptor.annotation)
    for word, values in (("bool", [None]), ("Path", PATHS), ("int", INTEGERS), ("float", FLOATS)):
        if word in kind:
            return values
    return TEXTS


def line_of(name, given):
    """The command line; what has no name goes last."""
    options, arguments = [], []
    for parameter in COMMANDS[name].params:
        if parameter.name not in given:
            continue
        value = given[parameter.name]
        if parameter.param_type_name == "argument":
            arguments.append(value)
        else:
            options += [parameter.opts[0], *([] if value is None else [value])]
    return [*name.split(), *options, "--", *arguments]


@pytest.fixture
def places(whole, corpus_folder, tmp_path, monkeypatch):
    """The folders and files that the capitals stand for, in a folder with others that are hostile."""
    # Where "../.." is too.
    work = tmp_path / "a" / "work"
    (work / "folder").mkdir(parents=True)
    (work / "broken").symlink_to(work / "gone")
    (work / "noise").write_bytes(random.Random(0).randbytes(999))
    rows = [{"source": "a", "target": "b", "text": f"a {n}", "label": "ab"[n % 2]} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(work)
    models = {name: str(whole / name.lower()) for name in ("BERT", "DECODER", "CAPTIONER")}
    data = {"CORPUS": corpus_folder, "ROWS": str(tmp_path / "rows.jsonl"), "IMAGES": "folder"}
    return models | data | {"OUTPUT": "output"}


class Stop(Exception):
    """Here the work itself would begin."""


@pytest.fixture
def run(command, monkeypatch):
    """Runs a command line up to its work, and gives its exit code and the lines of its error."""

    def stop(*args, **kwargs):
        raise Stop

    monkeypatch.setattr(regard.commands.app, "app", APP)
    for target in (
        "regard.training.families.train.make_accelerator",
        "regard.training.finetuning.finetune._load",
        "regard.training.planning.plan.TrialStep",
        "regard.commands.inspect_faithfulness.faithfulness",
        "regard.commands.inspect_senses.word_senses",
        "regard.commands.inspect_steps.plot_head_distances",
    ):
        monkeypatch.setattr(target, stop)
    for name in ("load_model", "load_part"):
        monkeypatch.setattr(f"regard.loading.{name}", kept(getattr(regard.loading, name)))
    monkeypatch.setenv("HF_TOKEN", "hf_token")

    def run(line):
        try:
            ended = command(*line)
        except Stop:
            return 0, []
        lines = [text for text in ended.err.splitlines() if text]
        # Above its error, the command line's own parser tells the usage.
        own = [number for number, text in enumerate(lines) if text.startswith("Error: ")]
        return ended.code, lines[own[0] :] if own else lines

    return run


def kept(load):
    """Loads each model once, where it can be loaded."""
    remembered = cache(lambda kind, path, label, *options: load(kind, path, label, *options))
    return lambda kind, path, label, *options: remembered(kind, path, label, *options)


def complaint_about(code, lines):
    """What is wrong with how a command ended; None if nothing is."""
    if code == 0:
        return None
    if code != 2:
        return f"exit code {code}"
    if len(lines) != 1 or not lines[0].startswith(("regard: ", "Error: ")):
        return f"no error of one line: {lines}"
    # What was wrong is named: an argument, or the thing itself.
    return None if "'" in lines[0] or "`" in lines[0] or "offline" in lines[0] else f"unnamed: {lines[0]}"


# The model of the one that is left out would have to be trained on glyphs.
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "inspect marks"])
def test_what_is_given_beside_is_right(run, places, name):
    given = {key: places.get(value, value) for key, value in given_to(name).items()}
    code, lines = run(line_of(name, given))
    assert code == 0 or "offline mode" in lines[-1]


@one_or_all
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option(run, places, tmp_path, name, thorough):
    """With one of its values, another one in each command that has the option, or with all of them."""
    given = {key: places.get(value, value) for key, value in given_to(name).items()}
    complaints = []
    for turn, parameter in enumerate(COMMANDS[name].params, list(COMMANDS).index(name)):
        for value in chosen(values_for(parameter), turn, thorough):
            try:
                found = complaint_about(*run(line_of(name, given | {parameter.name: value})))
            except Exception as error:
                found = repr(error)
            if found is not None:
                complaints.append(f"{parameter.name}={value[:50] if value else value!r}: {found[:300]}")
    assert not complaints, "\n".join(complaints)
