"""The command line in this process, and a tiny run for it to work on."""

import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers.utils import logging as transformers_logging

WORDS = "river stone water fish bank house door garden wall roof the a of under near beside".split()
TINY = {
    "vocab_size": 120,
    "max_length": 32,
    "batch_size": 8,
    "steps": 4,
    "validation": "0.25",
    "log_with": ["none"],
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    },
}


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> str:
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("texts") / "corpus"
    folder.mkdir()
    for number in range(10):
        sentences = (" ".join(rng.choices(WORDS, k=rng.randint(6, 12))).capitalize() + "." for _ in range(8))
        (folder / f"{number}.txt").write_text(" ".join(sentences), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def tiny(corpus_folder) -> dict:
    """Settings of a run that takes no time."""
    return {"data": [corpus_folder], **TINY}


@pytest.fixture(scope="session")
def run_folder(tiny, tmp_path_factory) -> Path:
    """A run that has ended."""
    from regard import train_bert

    folder = tmp_path_factory.mktemp("runs") / "run"
    train_bert(folder, tiny)
    return folder


@pytest.fixture
def command(capfd, monkeypatch):
    """Runs a command line, and says how it ended."""
    from regard.cli import main

    logger = logging.getLogger("regard")
    handlers, level, verbosity = logger.handlers, logger.level, transformers_logging.get_verbosity()
    datasets.disable_progress_bars()

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return Ended(code, *capfd.readouterr())

    yield run
    datasets.enable_progress_bars()
    logger.handlers = handlers
    logger.setLevel(level)
    transformers_logging.set_verbosity(verbosity)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Hub's bars are off for all tests
        transformers_logging.enable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    # The help is wrapped to the terminal.
    monkeypatch.setitem(os.environ, "COLUMNS", "300")
    monkeypatch.setitem(os.environ, "TERMINAL_WIDTH", "300")
