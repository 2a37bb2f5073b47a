"""Models that are not what they should be: each command refuses them in one line, and draws nothing in their place."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hub.models import make_model, save_model

# What loads a model, and of which type; `MODEL` and `OUTPUT` stand for its folder and for what comes out.
COMMANDS = {
    "fill": ("regard_bert", ["fill", "a [MASK] cat", "--model", "MODEL"]),
    "generate": ("regard_decoder", ["generate", "a cat", "--model", "MODEL", "--max-new-tokens", "2"]),
    "evaluate": ("regard_decoder", ["evaluate", "MODEL", "--data", "TEXTS", "--setting", "max_length=16"]),
    "export": ("regard_bert", ["export", "MODEL", "OUTPUT"]),
    "finetune": (
        "regard_bert",
        ["finetune", "classification", "--model", "MODEL", "--data", "ROWS", "--output", "OUTPUT"],
    ),
    "attention": ("regard_bert", ["inspect", "attention", "MODEL", "--output", "page.html", "--text", "a red cat"]),
    "shapes": ("regard_recurrent", ["inspect", "shapes", "MODEL", "--text", "a red cat"]),
}
every_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture
def line(tmp_path, monkeypatch, corpus_folder):
    """Makes the command line of a name, and gives it with the model's folder."""
    rows = [{"text": f"a {animal} sat", "label": animal} for animal in ("cat", "dog")] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)

    def make(name):
        model_type, arguments = COMMANDS[name]
        folder = save_model(tmp_path / "model", *make_model(model_type))
        places = {"MODEL": folder, "OUTPUT": tmp_path / "output", "ROWS": tmp_path / "rows.jsonl"}
        return folder, [(places | {"TEXTS": corpus_folder}).get(argument, argument) for argument in arguments]

    return make


def rewrite(folder, change):
    """Writes weights anew, as a function of name and tensor has them; None leaves one out."""
    weights = load_file(folder / "model.safetensors")
    changed = {name: change(name, tensor) for name, tensor in weights.items()}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    assert kept.keys() != weights.keys() or any(not torch.equal(kept[name], weights[name]) for name in kept)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@every_command
@pytest.mark.parametrize("how", ["missing", "of another shape"])
def test_weights_are_never_drawn(refusal, line, name, how):
    folder, arguments = line(name)
    first = next(key for key in sorted(load_file(folder / "model.safetensors")) if "embeddings" in key or "enc" in key)
    spoilt = None if how == "missing" else torch.zeros(3, 5)
    rewrite(folder, lambda key, tensor: spoilt if key == first else tensor)
    assert "of the weights that it needs, such as " in refusal(*arguments)


@every_command
def test_weights_that_are_not_finite(refusal, line, name):
    folder, arguments = line(name)
    rewrite(folder, lambda key, tensor: tensor * float("nan"))
    assert "has weights that are not finite: " in refusal(*arguments)


@every_command
def test_an_adapter_of_another_model(refusal, line, tmp_path, name):
    """It names the place of that one, which may be any."""
    folder, arguments = line(name)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "elsewhere")}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    assert "is an adapter (adapter_config.json) of another model" in refusal(*arguments)


@every_command
@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"abc": 5}}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", {"model_max_length": float("nan")}),
        ("tokenizer_config.json", {"cls_token": 5}),
        ("config.json", {"quantization_config": 5}),
        ("config.json", {"model_type": ["a"]}),
        ("config.json", {"architectures": 5}),
    ],
)
def test_fields_of_another_kind(refusal, line, name, file, fields):
    folder, arguments = line(name)
    content = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps(content))
    assert refusal(*arguments)


@pytest.mark.parametrize("fields", [{"eos_token_id": "x"}, {"max_new_tokens": 2.5}, {"pad_token_id": 1.5}])
def test_a_generation_configuration_of_another_kind(refusal, line, fields):
    folder, arguments = line("generate")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert next(iter(fields)) in refusal(*arguments)


def test_a_model_without_a_tokenizer(refusal, line):
    folder, arguments = line("fill")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in refusal(*arguments)


def test_a_tokenizer_without_a_mask(refusal, line):
    folder, arguments = line("fill")
    content = json.loads((folder / "tokenizer_config.json").read_text()) | {"mask_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    assert "has a tokenizer without a mask token" in refusal(*arguments)


@pytest.mark.parametrize("name", ["fill", "generate", "attention", "shapes"])
def test_text_that_is_none(refusal, line, name):
    _, arguments = line(name)
    arguments = [
        "a \udcff [MASK]" if argument in ("a [MASK] cat", "a cat", "a red cat") else argument for argument in arguments
    ]
    assert "is no text: it holds bytes that are not UTF-8" in refusal(*arguments)
