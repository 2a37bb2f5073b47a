"""The command line in this process, and tiny runs for it to work on."""

import json
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

from tests.support.hub.models import make_model, save_model

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


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder of tiny models that are whole, to be read or copied."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in ("bert", "decoder", "captioner"):
        save_model(folder / kind, *make_model(f"regard_{kind}"))
    return folder


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


@pytest.fixture(scope="session")
def tiny_decoder(tiny) -> dict:
    """Settings of a decoder's run that takes no time."""
    return {**tiny, "vocab_size": 300}


@pytest.fixture(scope="session")
def tiny_pairs(tmp_path_factory) -> dict:
    """Settings of an encoder-decoder's run that takes no time: words, to be written in capitals."""
    rng = random.Random(0)
    sources = [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(60)]
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = (json.dumps({"source": source, "target": source.upper()}) for source in sources)
    file.write_text("\n".join(rows), encoding="utf-8")
    config = {"hidden_size": 32}
    return {**TINY, "data": [str(file)], "vocab_size": 300, "config": config}


@pytest.fixture(scope="session")
def trained(tiny_decoder, tiny_pairs, tmp_path_factory):
    """Makes a run of a family that generates, once, and gives its folder."""
    from regard.training.families.recipes import TRAINABLE
    from regard.training.families.train import train

    folder = tmp_path_factory.mktemp("trained")

    def run(family: str) -> Path:
        if not (folder / family).exists():
            AcceleratorState._reset_state(reset_partial_state=True)
            train(TRAINABLE[family], folder / family, tiny_decoder if family == "decoder" else tiny_pairs)
        return folder / family

    return run


@pytest.fixture(scope="session")
def decoder_folder(trained) -> Path:
    """A decoder's run that has ended."""
    return trained("decoder")


@pytest.fixture
def command(capfd, monkeypatch):
    """Runs a command line, and says how it ended."""
    from regard.commands.app import main

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


@pytest.fixture
def tiny_of(tiny, tiny_decoder, tiny_pairs):
    """The tiny settings of a family."""
    return {"bert": tiny, "decoder": tiny_decoder, "transformer": tiny_pairs, "recurrent": tiny_pairs}.__getitem__


@pytest.fixture
def flags(tiny):
    """The tiny settings as flags, or others; what is given takes their place, and `None` leaves one out."""

    def make(settings: dict | None = None, /, **given) -> list[str]:
        made = []
        for name, value in {**(tiny if settings is None else settings), **given}.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, dict):
                made += [part for key, own in value.items() for part in (flag, f"{key}={own}")]
            elif isinstance(value, list):
                made += [part for own in value for part in (flag, str(own))]
            elif value is not None:
                made += [flag, str(value)]
        return made

    return make


@pytest.fixture
def refusal(command):
    """The one line that a command prints when it is used in a wrong way."""

    def run(*arguments: str) -> str:
        ended = command(*arguments)
        assert ended.code == 2
        lines = ended.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("regard: ")
        return lines[0]

    return run


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
