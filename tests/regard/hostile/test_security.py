"""Models of anyone: no command runs code of theirs, or reads or sends what lies outside of their folder."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hub.models import make_model, save_model

TOKEN = "hf_writewritewrite"
ROWS = [{"text": f"a {animal} sat", "label": animal} for animal in ("cat", "dog")] * 8

# What takes a model, and of which type; the folder and one for what comes out stand for `MODEL` and `OUTPUT`.
COMMANDS = {
    "fill": ("regard_bert", ["fill", "a [MASK] cat", "--model", "MODEL"]),
    "generate": ("regard_decoder", ["generate", "a cat", "--model", "MODEL", "--max-new-tokens", "2"]),
    "evaluate": ("regard_decoder", ["evaluate", "MODEL", "--data", "TEXTS", "--setting", "max_length=16"]),
    "export": ("regard_bert", ["export", "MODEL", "OUTPUT"]),
    "push": ("regard_bert", ["push", "MODEL", "me/x"]),
    "finetune": (
        "regard_bert",
        ["finetune", "classification", "--model", "MODEL", "--data", "ROWS", "--output", "OUTPUT", "--epochs", "1"],
    ),
}
every_command = pytest.mark.parametrize("name", COMMANDS)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def line(tmp_path, monkeypatch, corpus_folder):
    """Makes the command line of a name, and gives it with the model's folder."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    # Pushing ends at the offline mode, when all else is known to do.
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def make(name):
        model_type, arguments = COMMANDS[name]
        folder = save_model(tmp_path / "model", *make_model(model_type))
        places = {
            "MODEL": folder,
            "OUTPUT": tmp_path / "output",
            "ROWS": tmp_path / "rows.jsonl",
            "TEXTS": corpus_folder,
        }
        return folder, [places.get(argument, argument) for argument in arguments]

    return make


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# Code


def put_code(folder, trace):
    """Code that leaves a trace, beside a model and named by its files."""
    code = f"import os\nos.mkdir({str(trace)!r})\nfrom transformers import *\nclass Evil(PreTrainedConfig): pass\n"
    (folder / "evil.py").write_text(code)
    classes = (
        "AutoConfig AutoModel AutoModelForMaskedLM AutoModelForCausalLM AutoModelForSequenceClassification".split()
    )
    change(folder / "config.json", auto_map=dict.fromkeys(classes, "evil.Evil"))
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Evil"]})


@every_command
def test_code_beside_a_model_of_ours_is_not_run(command, line, tmp_path, name):
    folder, arguments = line(name)
    put_code(folder, tmp_path / "trace")
    ended = command(*arguments)
    assert not (tmp_path / "trace").exists()
    assert ended.code == 0 or "offline mode" in ended.err or "custom code" in ended.err
    assert "Traceback" not in ended.err


@every_command
def test_code_of_a_model_that_is_unknown_is_not_run(refusal, line, tmp_path, name):
    folder, arguments = line(name)
    put_code(folder, tmp_path / "trace")
    change(folder / "config.json", model_type="evil")
    assert "evil" in refusal(*arguments) or "custom code" in refusal(*arguments)
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "output").exists()


# Weights


@every_command
@pytest.mark.parametrize("is_evil", [True, False], ids=["evil", "weights alone"])
def test_pickled_weights_are_refused(refusal, line, tmp_path, name, is_evil):
    folder, arguments = line(name)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | ({"evil": Evil(tmp_path / "trace")} if is_evil else {}), folder / "pytorch_model.bin")
    assert "has its weights in pytorch_model.bin, which is not loaded since it may run code" in refusal(*arguments)
    assert not (tmp_path / "trace").exists()


@every_command
def test_a_pickle_under_the_name_of_safetensors_is_refused(refusal, line, tmp_path, name):
    folder, arguments = line(name)
    torch.save({"evil": Evil(tmp_path / "trace")}, folder / "model.safetensors")
    assert "has no complete model.safetensors" in refusal(*arguments)
    assert not (tmp_path / "trace").exists()


@every_command
@pytest.mark.parametrize("place", ["../weights.safetensors", "{}/weights.safetensors", "a/../../weights.safetensors"])
def test_weights_outside_of_the_folder_are_refused(refusal, line, tmp_path, name, place):
    folder, arguments = line(name)
    shutil.move(folder / "model.safetensors", tmp_path / "weights.safetensors")
    place = place.format(tmp_path)
    names = load_file(tmp_path / "weights.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names {place!r}, which is not a safetensors file in the folder" in refusal(*arguments)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "[" * 5_000])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_files_of_a_model_that_do_not_read(refusal, line, file, content):
    folder, arguments = line("generate")
    (folder / file).write_text(content)
    assert f"`model` ({folder}) has a {file} that is not " in refusal(*arguments)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_a_file_that_holds_no_tokenizer(refusal, line, content):
    folder, arguments = line("generate")
    (folder / "tokenizer.json").write_text(content)
    assert f"`model` ({folder}) has a tokenizer.json that is not a tokenizer: " in refusal(*arguments)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 5}, "metadata": {}}, {"metadata": 5}])
def test_an_index_that_names_no_weights(refusal, line, index):
    folder, arguments = line("generate")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"`model` ({folder}) has a model.safetensors.index.json " in refusal(*arguments)


# Links


def test_a_link_out_of_the_folder_is_not_pushed(refusal, line, tmp_path):
    folder, arguments = line("push")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    assert f"holds notes.txt, a link to {tmp_path / 'secret.txt'}, which is outside of it" in refusal(*arguments)


def test_links_within_the_folder_and_those_of_a_cache_are_pushed(refusal, line, tmp_path):
    folder, arguments = line("push")
    (folder / "notes.txt").symlink_to("config.json")
    assert "offline mode" in refusal(*arguments)
    # As the client of the Hub lays out what it has downloaded.
    cache = tmp_path / "models--me--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    shutil.move(folder, cache / "snapshots" / "0123")
    for file in (cache / "snapshots" / "0123").iterdir():
        if not file.is_symlink():
            shutil.move(file, cache / "blobs" / file.name)
            file.symlink_to(f"../../blobs/{file.name}")
    assert "offline mode" in refusal("push", cache / "snapshots" / "0123", "me/x")
