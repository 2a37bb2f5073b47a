"""Checkpoints with their code beside them: loaded where the package is not, and where it is."""

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.dynamic_module_utils import get_relative_import_files

import regard
from regard.sharing.bundle import write_bundle
from regard.tokenization.byte_level import train_byte_level
from regard.tokenization.characters import train_characters
from regard.tokenization.generative import save_tokenizer
from regard.tokenization.processor import make_captioner_processor
from regard.tokenization.wordpiece import train_wordpiece
from regard.tokenization.words import train_words
from tests.support.families import FAMILIES, PROCESSORS
from tests.support.fresh import run_python

ROOT = Path(regard.__file__).resolve().parents[1]
FAMILY_NAMES = {config_class.model_type: config_class for config_class in FAMILIES}
CLASSES = [(config_class.model_type, name) for config_class, models in FAMILIES.items() for name in models]
IDS = [f"{model_type}-{name}" for model_type, name in CLASSES]
GENERATING = [
    (model_type, name) for model_type, name in CLASSES if model_type != "regard_bert" and name != "AutoModel"
]

TEXTS = ["a red cat sat on a mat", "a blue dog, sitting on a red mat"]
TOKENIZERS = {
    "regard_bert": lambda: train_wordpiece(TEXTS, vocab_size=41),
    "regard_decoder": lambda: train_byte_level(TEXTS, vocab_size=270),
    "regard_transformer": lambda: train_byte_level(TEXTS, vocab_size=265),
    "regard_recurrent": lambda: train_characters(TEXTS),
    "regard_captioner": lambda: train_words(TEXTS),
}
SIZES = {
    "regard_bert": {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 22, "num_labels": 2},
    "regard_decoder": {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 26},
    "regard_transformer": {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 23},
    "regard_recurrent": {"num_hidden_layers": 2, "encoder_hidden_size": 5},
    "regard_captioner": {"num_hidden_layers": 1},
}


def save_checkpoint(folder: Path, model_type: str, auto_class: str) -> None:
    """Saves a tiny model with all that belongs to it, a batch for it, and what it makes of that."""
    config_class = FAMILY_NAMES[model_type]
    tokenizer = TOKENIZERS[model_type]()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 18, "initializer_range": 0.5}
    torch.manual_seed(0)
    FAMILIES[config_class][auto_class](config_class(**sizes, **SIZES[model_type])).save_pretrained(folder)
    # Where weights lie in memory may change the last bit of a product, so a fresh model is no measure.
    model = FAMILIES[config_class][auto_class].from_pretrained(folder)
    ids = torch.randint(5, len(tokenizer), (2, 7))
    inputs = {"input_ids": ids}
    if auto_class == "AutoModelForMultipleChoice":
        inputs = {"input_ids": ids.view(1, 2, 7)}
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :4].flip(0)
    if config_class in PROCESSORS:
        inputs["pixel_values"] = torch.randn(2, 3, 40, 24)
        del inputs["input_ids"]
        make_captioner_processor(tokenizer, (40, 24)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    write_bundle(folder)
    torch.save({"inputs": inputs, **outputs_of(model, inputs)}, folder.with_suffix(".pt"))


def outputs_of(model, inputs):
    """All tensors that a model returns for a batch, and what it generates."""
    import torch

    with torch.no_grad():
        found = {"outputs": [value for value in model(**inputs).values() if isinstance(value, torch.Tensor)]}
        if model.can_generate():
            prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
            found["generated"] = model.generate(**prompt, max_new_tokens=6, do_sample=False, num_beams=2)
    return found


def load_without_the_package(root, package_root):
    """Loads every checkpoint, saves it again and loads that, and writes down what came of it."""
    import sys
    from pathlib import Path

    import torch
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # Whether or not it is installed.
    sys.modules["regard"] = None
    found, text, picture = {}, "a red cat, sitting", Path(root, "picture.png")
    for expected in sorted(Path(root).glob("*.pt")):
        folder, again = expected.with_suffix(""), expected.with_suffix(".again")
        auto_class = getattr(transformers, folder.name.partition("-")[2])
        inputs = torch.load(expected)["inputs"]
        try:
            auto_class.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            refusal = str(error)
        model = auto_class.from_pretrained(folder, trust_remote_code=True)
        model.save_pretrained(again)
        loaded = auto_class.from_pretrained(again, trust_remote_code=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        found[folder.name] = {
            "refusal": refusal,
            "class": type(model).__name__,
            "module": type(model).__module__,
            "first": outputs_of(model, inputs),
            "again": outputs_of(loaded, inputs),
            "ids": tokenizer(text)["input_ids"],
        }
        if (folder / "processor_config.json").exists():
            processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
            processor.save_pretrained(again)
            reloaded = transformers.AutoProcessor.from_pretrained(again, trust_remote_code=True)
            for name, each in (("processed", processor), ("processed again", reloaded)):
                found[folder.name][name] = dict(each(images=str(picture), text="a", return_tensors="pt"))

    # From the Hub, the files lie in one folder for all classes; there is a snapshot of them in the cache.
    name = "regard_bert-AutoModelForMaskedLM"
    folder, inputs = Path(root, name), torch.load(Path(root, f"{name}.pt"))["inputs"]
    from_hub = transformers.AutoModelForMaskedLM.from_pretrained("someone/something", trust_remote_code=True)
    tasks = transformers.AutoModelForTokenClassification.from_pretrained("someone/something", trust_remote_code=True)
    found["hub"] = outputs_of(from_hub, inputs)
    found["hub encoder"] = [each(**inputs)[0] for each in (from_hub.bert, tasks.bert)]

    # The package comes in after the code beside the checkpoint, and that once more after the package.
    del sys.modules["regard"]
    sys.path.insert(0, package_root)
    import regard

    registered = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    beside = get_class_from_dynamic_module(
        "regard_modeling_bert_pretraining.RegardBertForMaskedLM", Path(root, f"{name}.again")
    )
    together = {"registered": registered, "early": type(from_hub).from_pretrained(folder)}
    together |= {"late": beside.from_pretrained(folder), "registered still": type(registered).from_pretrained(folder)}
    found["registered class"] = type(registered) is regard.RegardBertForMaskedLM
    found["together"] = {name: outputs_of(model, inputs) for name, model in together.items()}
    torch.save(found, Path(root, "found"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A folder with a checkpoint of each class, named for it."""
    from PIL import Image

    root = tmp_path_factory.mktemp("checkpoints")
    pixels = np.random.default_rng(3).integers(0, 256, (33, 21, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(root / "picture.png")
    for model_type, auto_class in CLASSES:
        save_checkpoint(root / f"{model_type}-{auto_class}", model_type, auto_class)
    return root


@pytest.fixture(scope="module")
def found(checkpoints, tmp_path_factory) -> dict:
    """What a process finds that never had the package, and starts with empty caches."""
    home = tmp_path_factory.mktemp("home")
    cached = home / "hub" / "models--someone--something"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(checkpoints / "regard_bert-AutoModelForMaskedLM", cached / "snapshots" / commit)
    script = home / "script.py"
    parts = [inspect.getsource(each) for each in (outputs_of, load_without_the_package)]
    script.write_text("\n\n".join([*parts, f"load_without_the_package({str(checkpoints)!r}, {str(ROOT)!r})\n"]))
    subprocess.run([sys.executable, "-I", script], cwd=home, env={**os.environ, "HF_HOME": str(home)}, check=True)
    return torch.load(checkpoints / "found")


def assert_equal(actual: dict, expected: dict) -> None:
    assert len(actual["outputs"]) == len(expected["outputs"]) > 0
    assert all(map(torch.equal, actual["outputs"], expected["outputs"]))
    assert ("generated" in actual) == ("generated" in expected)
    if "generated" in expected:
        assert actual["generated"].equal(expected["generated"])


@pytest.mark.parametrize(("model_type", "auto_class"), CLASSES, ids=IDS)
def test_every_class_loads_without_the_package(model_type, auto_class, checkpoints, found):
    name = f"{model_type}-{auto_class}"
    actual, expected = found[name], torch.load(checkpoints / f"{name}.pt")
    model_class = FAMILIES[FAMILY_NAMES[model_type]][auto_class]
    assert actual["class"] == model_class.__name__
    assert actual["module"].startswith("transformers_modules.")
    assert_equal(actual["first"], expected)
    generating = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")
    assert ("generated" in expected) == (auto_class in generating)


@pytest.mark.parametrize(("model_type", "auto_class"), CLASSES, ids=IDS)
def test_what_was_loaded_can_be_saved_with_its_code(model_type, auto_class, checkpoints, found):
    name = f"{model_type}-{auto_class}"
    assert_equal(found[name]["again"], found[name]["first"])
    again = checkpoints / f"{name}.again"
    auto_map = json.loads((again / "config.json").read_text())["auto_map"]
    assert auto_map == json.loads((checkpoints / name / "config.json").read_text())["auto_map"]
    # Also the family's other classes.
    for reference in auto_map.values():
        module = again / f"{reference.partition('.')[0]}.py"
        for path in (module, *map(Path, get_relative_import_files(module))):
            assert path.read_bytes() == (checkpoints / name / path.name).read_bytes()


@pytest.mark.parametrize(("model_type", "auto_class"), CLASSES, ids=IDS)
def test_code_is_not_run_unless_it_is_trusted(model_type, auto_class, found):
    assert "contains custom code" in found[f"{model_type}-{auto_class}"]["refusal"]
    assert "trust_remote_code=True" in found[f"{model_type}-{auto_class}"]["refusal"]


@pytest.mark.parametrize(("model_type", "auto_class"), CLASSES, ids=IDS)
def test_the_tokenizer_loads_without_the_package(model_type, auto_class, found):
    ids = TOKENIZERS[model_type]()("a red cat, sitting")["input_ids"]
    assert found[f"{model_type}-{auto_class}"]["ids"] == ids


def test_the_processor_loads_without_the_package(checkpoints, found):
    processor = make_captioner_processor(TOKENIZERS["regard_captioner"](), (40, 24))
    expected = processor(images=checkpoints / "picture.png", text="a", return_tensors="pt")
    name = "regard_captioner-AutoModelForImageTextToText"
    for actual in (found[name]["processed"], found[name]["processed again"]):
        assert actual.keys() == expected.keys()
        assert all(actual[key].equal(expected[key]) for key in expected)


def test_a_checkpoint_on_the_hub_loads_without_the_package(checkpoints, found):
    assert_equal(found["hub"], torch.load(checkpoints / "regard_bert-AutoModelForMaskedLM.pt"))
    encoder, that_of_another_head = found["hub encoder"]
    assert encoder.equal(that_of_another_head)


@pytest.mark.parametrize("loaded", ["registered", "early", "late", "registered still"])
def test_the_package_and_code_beside_a_checkpoint_get_along(loaded, checkpoints, found):
    assert found["registered class"]
    assert_equal(found["together"][loaded], torch.load(checkpoints / "regard_bert-AutoModelForMaskedLM.pt"))


@pytest.mark.parametrize("trust_remote_code", [None, False, True])
@pytest.mark.parametrize(("model_type", "auto_class"), CLASSES, ids=IDS)
def test_the_registered_class_wins(model_type, auto_class, trust_remote_code, checkpoints, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("asked for the code beside the checkpoint")

    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.setattr(transformers.models.auto.auto_factory, "get_class_from_dynamic_module", refuse)
    monkeypatch.setattr(transformers.models.auto.configuration_auto, "get_class_from_dynamic_module", refuse)
    monkeypatch.setattr(transformers.models.auto.processing_auto, "get_class_from_dynamic_module", refuse)
    folder = checkpoints / f"{model_type}-{auto_class}"
    options = {"trust_remote_code": trust_remote_code}
    model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    config_class = FAMILY_NAMES[model_type]
    assert type(model) is FAMILIES[config_class][auto_class]
    assert type(model.config) is config_class
    expected = torch.load(folder.with_suffix(".pt"))
    assert_equal(outputs_of(model, expected["inputs"]), expected)
    if config_class in PROCESSORS:
        assert type(transformers.AutoProcessor.from_pretrained(folder, **options)) is PROCESSORS[config_class]


@pytest.fixture(params=FAMILY_NAMES)
def bundled(request, tmp_path) -> tuple[Path, list[Path]]:
    """A folder with a configuration and the code of a family, and the files of code."""
    FAMILY_NAMES[request.param]().save_pretrained(tmp_path)
    if request.param == "regard_captioner":
        make_captioner_processor(TOKENIZERS[request.param](), 8).save_pretrained(tmp_path)
    return tmp_path, write_bundle(tmp_path)


def test_the_auto_map_names_every_class(bundled):
    folder, written = bundled
    config = json.loads((folder / "config.json").read_text())
    config_class = FAMILY_NAMES[config["model_type"]]
    named = {"AutoConfig": config_class, **FAMILIES[config_class]}
    maps = [(config["auto_map"], named)]
    if config_class in PROCESSORS:
        processor_map = json.loads((folder / "processor_config.json").read_text())["auto_map"]
        maps.append((processor_map, {"AutoProcessor": PROCESSORS[config_class]}))
    for auto_map, classes in maps:
        assert {name: reference.partition(".")[2] for name, reference in auto_map.items()} == {
            name: each.__name__ for name, each in classes.items()
        }
        for reference in auto_map.values():
            module, _, name = reference.partition(".")
            tree = ast.parse((folder / f"{module}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    # What transformers finds from there is all that was written, and nothing is missing.
    reached = {f"{reference.partition('.')[0]}.py" for auto_map, _ in maps for reference in auto_map.values()}
    reached |= {Path(path).name for name in reached for path in get_relative_import_files(folder / name)}
    assert reached == {path.name for path in written}


def test_the_files_are_the_modules_but_for_imports(bundled):
    folder, written = bundled
    assert written == sorted(folder.glob("*.py"))
    for path in written:
        assert path.name.startswith("regard_")
        header, source = path.read_text().split("\n\n", 1)
        module = re.search(r"This is (regard[.\w]+),", header)[1]
        assert path.stem == module.replace(".", "_")
        original = Path(importlib.import_module(module).__file__).read_text()
        assert all(line.startswith("# ") for line in header.splitlines())
        source = source.partition("\n\n\n# transformers saves a model with")[0].rstrip("\n") + "\n"
        # Imports of the package's modules are sorted anew; all other lines keep their order.
        lines, expected = without_own_imports(source), without_own_imports(original)
        assert sorted(lines) == sorted(expected)
        is_own = re.compile(r"import \[").match
        assert [line for line in lines if not is_own(line)] == [line for line in expected if not is_own(line)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                inside = isinstance(node, ast.ImportFrom) and node.level == 1
                assert all(name.split(".")[0] != "regard" for name in names)
                assert inside == all(name.startswith("regard_") for name in names)


def without_own_imports(source: str) -> list[str]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = sorted(ast.unparse(alias) for alias in node.names)
            lines[node.lineno - 1 : node.end_lineno] = [f"import {names}"] + [""] * (node.end_lineno - node.lineno)
    return [line for line in lines if line]


def test_the_files_pass_the_linter(bundled):
    pytest.importorskip("ruff")
    folder, _ = bundled
    config = Path(__file__).parents[2] / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(config), str(folder)]
        run = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.returncode == 0, run.stdout


def test_it_is_the_same_each_time(bundled):
    folder, written = bundled
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert write_bundle(str(folder)) == written
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_it_is_the_same_in_every_process(checkpoints, tmp_path):
    """Another seed of the hashes gives sets another order."""
    folders = [checkpoints / f"{model_type}-{next(iter(FAMILIES[each]))}" for model_type, each in FAMILY_NAMES.items()]
    for folder in folders:
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.py"))
    script = "import pathlib, sys\nfrom regard.sharing.bundle import write_bundle\n"
    script += "for folder in pathlib.Path(sys.argv[1]).iterdir():\n    write_bundle(folder)\n"
    done = run_python(script, ROOT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for folder in folders:
        written = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / folder.name).iterdir()} == written


def test_only_the_auto_map_is_added_to_a_configuration(bundled, tmp_path_factory):
    folder, _ = bundled
    text = (folder / "config.json").read_text()
    config = json.loads(text)
    plain = tmp_path_factory.mktemp("plain")
    FAMILY_NAMES[config["model_type"]]().save_pretrained(plain)
    del config["auto_map"]
    assert config == json.loads((plain / "config.json").read_text())
    # As `save_pretrained` would write it, so that nothing else changes when the model is saved again.
    loaded = transformers.AutoConfig.from_pretrained(folder)
    loaded.save_pretrained(plain)
    assert (plain / "config.json").read_text() == text


def test_a_captioner_without_a_processor_has_no_code_for_one(tmp_path):
    regard.RegardCaptionerConfig().save_pretrained(tmp_path)
    assert not any("processor" in path.name for path in write_bundle(tmp_path))
    assert not (tmp_path / "processor_config.json").exists()


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_bundle(tmp_path)
    transformers.BertConfig().save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="the model type 'bert', none of regard's"):
        write_bundle(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="the model type None, none of regard's"):
        write_bundle(tmp_path)
    assert before.keys() == set(tmp_path.iterdir())
