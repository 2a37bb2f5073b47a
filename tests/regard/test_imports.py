"""What is imported when, which a test can tell in a fresh process alone."""

import json
import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import regard
from regard.importing import MOVED

ROOT = Path(__file__).parents[2]
# Command lines and the exit codes that they end with.
LIGHT = {
    "--help": 0,
    "--version": 0,
    "--hlep": 2,
    "trian": 2,
    "train --help": 0,
    "train berd": 2,
    "train bert --help": 0,
    "train captioner --no-such-option 3": 2,
    "train recurrent --steps few": 2,
    "finetune --help": 0,
    "finetune classification --help": 0,
    "finetune tokens --text-column text": 2,
    "plan --help": 0,
    "plan bert --help": 0,
    "plan decoder --clip 1": 2,
    "inspect --help": 0,
    "inspect shapes --help": 0,
    "inspect senses --hlep": 2,
    "fill --help": 0,
    "generate a --top-k few": 2,
    "evaluate --help": 0,
    "export": 2,
    "push --help": 0,
}


def fresh(code: str, *arguments: str) -> str:
    """What a fresh Python prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return ended.stdout.splitlines()[-1]


HELP = """
import json, sys
from regard.commands.app import main
codes = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["regard", *line.split()]
    try:
        main()
    except SystemExit as stop:
        codes[line] = stop.code
heavy = ("torch", "transformers", "accelerate", "datasets", "huggingface_hub")
print(json.dumps([codes, [name for name in heavy if name in sys.modules]]))
"""


def test_help_and_wrong_options_need_no_library():
    codes, imported = json.loads(fresh(HELP, json.dumps(list(LIGHT))))
    assert codes == LIGHT
    assert imported == []


ORDERS = [
    "import regard; import transformers",
    "import transformers; import regard",
    "import regard.registration",
    "import regard; regard.modeling.attention.attend",
    "from regard.configuration.base import RegardConfig",
    "from regard.modeling.cpu.linear import linear",
    "from regard.tokenization.processor import RegardCaptionerProcessor",
]
# Each order is tried in a process of its own, forked before anything is imported but torch.
REGISTRATION = """
import json, os, sys
import torch
failed = []
for order in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(order)
        import transformers
        from transformers import AutoConfig, AutoModelForMaskedLM, PROCESSOR_MAPPING, TOKENIZER_MAPPING
        config = AutoConfig.for_model("regard_bert", hidden_size=4, num_attention_heads=1, num_hidden_layers=1)
        model = AutoModelForMaskedLM.from_config(config)
        assert type(model).__module__ == "regard.modeling.bert_pretraining", type(model)
        assert type(config) in TOKENIZER_MAPPING
        assert type(AutoConfig.for_model("regard_captioner")) in PROCESSOR_MAPPING
        os._exit(0)
    if os.wait()[1]:
        failed.append(order)
print(json.dumps(failed))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_auto_classes_know_the_families_in_every_order_of_imports():
    assert json.loads(fresh(REGISTRATION, json.dumps(ORDERS))) == []


def test_names_are_those_of_the_package():
    assert set(regard.__all__) <= set(dir(regard))
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    assert not hasattr(regard, "RegardGptModel")


@pytest.mark.parametrize("old", MOVED)
def test_modules_that_moved_are_found_by_their_old_names(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}") as told:
        module = import_module(old)
    assert module is import_module(MOVED[old])
    assert module.__name__ == module.__spec__.name == MOVED[old]
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_module(old) is module
