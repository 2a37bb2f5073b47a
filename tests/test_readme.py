"""What the README and the pages in docs show works: their Python is run, commands, options and links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from typer.testing import CliRunner

from regard.commands.app import app
from tests.support.fresh import run_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]

SMALL_RUNS = """
import regard
small = {"steps": 2, "batch_size": 8, "save_every": 0, "evaluation_batches": 1, "log_with": "none"}
width = {"num_hidden_layers": 1, "hidden_size": 16}
text = {"max_documents": 40, "vocab_size": 600, "max_length": 32, "config": {**width, "intermediate_size": 16}}
regard.train_bert("runs/bert", {**small, **text})
regard.train_decoder("runs/decoder", {**small, **text})
regard.train_transformer("runs/transformer", {**small, "max_pairs": 40, "config": width})
regard.train_recurrent("runs/recurrent", {**small, "max_pairs": 40, "config": width})
regard.train_captioner("runs/captioner", {**small, "max_images": 40, "config": width})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds runs at the README's places."""
    folder = tmp_path_factory.mktemp("readme")
    made = run_python(SMALL_RUNS, folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python_runs(snippet: str, folder: Path) -> None:
    done = run_python(snippet, folder)
    assert done.returncode == 0, done.stderr


def test_there_is_python_to_run() -> None:
    assert len(SNIPPETS) == README.count("```python\n") >= 4


def run_command(line: str, folder: Path) -> CompletedProcess[str]:
    code = "from regard.commands.app import main; main()"
    return run_python(code, folder, *shlex.split(line, comments=True)[1:])


def help_of(command: str) -> str:
    """What a command prints when it is given `--help`, in this process."""
    shown = CliRunner().invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("regard ")])
def test_commands_run(line: str, folder: Path) -> None:
    command, *options = re.split(r" (?=--|#)", line.removeprefix("regard "))
    # What a training does is tested elsewhere; here its command need only be one, with these options.
    if command.startswith("train") or "--help" in options:
        shown = help_of(command.strip())
        assert all(option.split()[0] in shown for option in options if option.startswith("--"))
    else:
        done = run_command(line, folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def options_of(*commands: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", " ".join(map(help_of, commands))))


@pytest.mark.slow
def test_the_walk_through_of_fine_tuning_runs(folder: Path) -> None:
    """Its Python and its commands, one after the other."""
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    for kind, text in blocks:
        # A pass over the data is enough here.
        done = run_python(text, folder) if kind == "python" else run_command(f"{text.strip()} --epochs 1", folder)
        assert done.returncode == 0, done.stderr
    commands = ("finetune classification", "finetune question-answering", "push")
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= options_of(*commands)


@pytest.mark.slow
def test_the_page_on_inspection_runs(folder: Path) -> None:
    page = (ROOT / "docs" / "inspection.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "sh"}
    for kind, text in blocks:
        for part in [text] if kind == "python" else text.splitlines():
            done = (run_python if kind == "python" else run_command)(part, folder)
            assert done.returncode == 0, done.stderr
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= options_of("inspect attention", "inspect marks")


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    target = shlex.split(line, comments=True)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_options_exist() -> None:
    told = set(re.findall(r"`[^`\n]*?(--[a-z-]+)", README)) - {"--logdir", "--nproc-per-node"}
    commands = [
        *(f"train {name}" for name in ("bert", "decoder", "transformer", "recurrent", "captioner")),
        "evaluate",
        "finetune tokens",
        "generate",
        "plan bert",
        "push",
    ]
    assert told
    assert told <= options_of(*commands)


def test_options_of_the_page_on_runs_exist() -> None:
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    told = set(re.findall(r"--[a-z][a-z-]+", page))
    assert {"--resume", "--accept-changes", "--keep-best", "--skip-nonfinite"} <= told
    assert told <= options_of("train bert")


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert "](" in README
