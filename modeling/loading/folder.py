"""Checks of a model's folder before anything is loaded from it, since it may come from anyone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Endings of files that run code when they are loaded, or whose formats may.
PICKLES = (".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
# Name of a shard in the folder itself: no separator, and nothing that points to another folder.
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
# Files that are read beside the weights and the configuration, if they exist.
_TOKENIZER, _ADAPTER = "tokenizer.json", "adapter_config.json"
_OTHERS = """generation_config.json tokenizer_config.json processor_config.json preprocessor_config.json
special_tokens_map.json added_tokens.json""".split()


def check_model_folder(folder: Path, label: str) -> None:
    """Checks that the files of a model can be read, and that its weights are inside the folder and run no code.

    Args:
        folder: folder of the model.
        label: the model's name in errors.

    Raises:
        ValueError: if a file fails a check, naming the file.
    """
    read_json(folder, CONFIG, label)
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"{label} is an adapter ({_ADAPTER}) of another model, which may lie anywhere: merge it into that model "
            "and save the result"
        )
    for name in _OTHERS:
        if (folder / name).exists():
            read_json(folder, name, label)
    if (folder / _TOKENIZER).exists():
        try:
            Tokenizer.from_file(str(folder / _TOKENIZER))
        except Exception as error:  # `tokenizers` raises this class itself
            raise ValueError(f"{label} has a {_TOKENIZER} that is not a tokenizer: {error}") from None
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        check_weights(folder, label)
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
    if pickles:
        raise ValueError(
            f"{label} has its weights in {pickles[0]}, which is not loaded since it may run code: save them as "
            "safetensors, with `save_pretrained`"
        )


def check_weights(folder: Path, label: str) -> None:
    """Checks that there are complete weights in safetensors files.

    Raises:
        ValueError: if weights are missing or incomplete, or if the index names a file outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif (folder / INDEX).is_file():
        names = _shards(folder, label)
    else:
        raise ValueError(f"{label} has no weights: it needs {WEIGHTS}, or {INDEX} and its shards")
    for name in names:
        try:
            with safe_open(folder / name, "np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{label} has no complete {name}: {error}") from None


def _shards(folder: Path, label: str) -> list[str]:
    content = read_json(folder, INDEX, label)
    weight_map = content.get("weight_map")
    if not (weight_map and isinstance(weight_map, dict) and isinstance(content.get("metadata"), dict)):
        raise ValueError(f"{label} has a {INDEX} without the JSON objects `weight_map` and `metadata`")
    for name in weight_map.values():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise ValueError(
                f"{label} has a {INDEX} that names {name!r}, which is not a safetensors file in the folder"
            )
    return sorted(set(weight_map.values()))


def read_json(folder: Path, name: str, label: str) -> dict[str, Any]:
    """Reads a file that contains a JSON object.

    Raises:
        ValueError: if the file does not exist, or contains anything else.
    """
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        # An escape can be half a surrogate pair, which could not be saved again with the model.
        json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise ValueError(f"{label} is not a model: it has no {name}") from None
    except OSError as error:
        raise ValueError(f"{label} has a {name} that cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{label} has a {name} that is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{label} has a {name} that is not a JSON object")
    return content
