"""The folder of a model, looked over before anything of it is loaded: it may come from anyone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Files that run code when they are loaded, or are of formats that do.
PICKLES = (".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
# Of a shard, in the folder itself: no separator, and nothing that stands for another folder.
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
# What is read beside the weights and the configuration, if it is there.
_TOKENIZER, _ADAPTER = "tokenizer.json", "adapter_config.json"
_OTHERS = """generation_config.json tokenizer_config.json processor_config.json preprocessor_config.json
special_tokens_map.json added_tokens.json""".split()


def check_model_folder(folder: Path, label: str) -> None:
    """Checks that the files of a model can be read, and that its weights lie in it and run no code.

    Args:
        folder: of the model.
        label: what errors call it.

    Raises:
        ValueError: if not, naming the file.
    """
    read_json(folder, CONFIG, label)
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"{label} is an adapter ({_ADAPTER}) of another model, which may lie anywhere: merge it into that one and "
            "save the whole"
        )
    for name in _OTHERS:
        if (folder / name).exists():
            read_json(folder, name, label)
    if (folder / _TOKENIZER).exists():
        try:
            Tokenizer.from_file(str(folder / _TOKENIZER))
        except Exception as error:  # it has no class of its own
            raise ValueError(f"{label} has a {_TOKENIZER} that holds no tokenizer: {error}") from None
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        check_weights(folder, label)
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
    if pickles:
        raise ValueError(
            f"{label} has its weights in {pickles[0]}, which may run code when loaded and is not: save them with "
            "`save_pretrained`, as safetensors"
        )


def check_weights(folder: Path, label: str) -> None:
    """Checks that weights are there, whole, as safetensors.

    Raises:
        ValueError: if not, or if the index names a file that is not in the folder.
    """
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        names = _shards(folder, label)
    else:
        raise ValueError(f"{label} holds no weights: {WEIGHTS} or {INDEX} and its shards")
    for name in names:
        try:
            with safe_open(folder / name, "np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{label} has no whole {name}: {error}") from None


def _shards(folder: Path, label: str) -> list[str]:
    content = read_json(folder, INDEX, label)
    weight_map = content.get("weight_map")
    if not (weight_map and isinstance(weight_map, dict) and isinstance(content.get("metadata"), dict)):
        raise ValueError(f"{label} has a {INDEX} without a `weight_map` and `metadata`, which are JSON objects")
    for name in weight_map.values():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise ValueError(f"{label} has a {INDEX} that names {name!r}, which is no safetensors file inside of it")
    return sorted(set(weight_map.values()))


def read_json(folder: Path, name: str, label: str) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        ValueError: if it is not there, or is none.
    """
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        # Half a surrogate pair, which an escape can stand for, could not be written again with the model.
        json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise ValueError(f"{label} is no model: it has no {name}") from None
    except OSError as error:
        raise ValueError(f"{label} has a {name} that can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{label} has a {name} that is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{label} has a {name} that is not a JSON object")
    return content
