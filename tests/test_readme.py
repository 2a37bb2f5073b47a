"""What the README shows works: its Python is run, its commands and options exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]

SMALL_RUN = """
import regard
regard.train_bert("runs/bert", {
    "max_documents": 40, "vocab_size": 600, "steps": 2, "max_length": 32, "save_every": 0, "log_with": "none",
    "config": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
})
"""


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a run at the README's place."""
    folder = tmp_path_factory.mktemp("readme")
    made = run_python(SMALL_RUN, folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python_runs(snippet: str, folder: Path) -> None:
    done = run_python(snippet, folder)
    assert done.returncode == 0, done.stderr


def test_there_is_python_to_run() -> None:
    assert len(SNIPPETS) == README.count("```python") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("regard ")])
def test_commands_run(line: str, folder: Path) -> None:
    code = f"import sys; sys.argv = {shlex.split(line)!r}; from regard.cli import main; main()"
    done = run_python(code, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    target = shlex.split(line, comments=True)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_options_exist(folder: Path) -> None:
    told = set(re.findall(r"`[^`\n]*?(--[a-z-]+)", README)) - {"--logdir"}
    code = "import sys; sys.argv = ['regard', 'train', 'bert', '--help']; from regard.cli import main; main()"
    known = set(re.findall(r"--[a-z-]+", run_python(code, folder).stdout))
    assert told
    assert told <= known


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
