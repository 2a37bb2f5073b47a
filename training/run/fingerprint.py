"""What a run began with, so that one that goes on can tell what has changed since."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig

from ...modeling.loading.folder import read_json
from .files import write_text

ORIGIN_FILE = "origin.json"

# Of larger data so many rows are looked at, evenly spaced.
ROWS_LOOKED_AT = 2**14
_ROWS_AT_ONCE = 256

# What a configuration holds that says nothing of the model.
_INCIDENTAL = ("transformers_version", "_name_or_path")


def package_versions() -> dict[str, str]:
    """The versions of the packages that a training depends on."""
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")}


def describe_rows(rows: Dataset) -> dict[str, Any]:
    """The number of rows, and a digest of what they hold: not of where they are, or of how they got there.

    Args:
        rows: all of them are looked at, or as many as `ROWS_LOOKED_AT`.
    """
    # Where a document was read from changes with the folder that its path begins at.
    columns = [name for name in rows.column_names if not (name == "source" and "text" in rows.column_names)]
    table = rows.select_columns(columns).with_format("arrow")
    number = min(len(rows), ROWS_LOOKED_AT)
    places = [place * len(rows) // number for place in range(number)]
    digest = hashlib.sha256(repr(columns).encode())
    for start in range(0, number, _ROWS_AT_ONCE):
        for row in table[places[start : start + _ROWS_AT_ONCE]].to_pylist():
            for name in columns:
                content = _content(row[name])
                digest.update(len(content).to_bytes(8, "little"))
                digest.update(content)
    return {"rows": len(rows), "digest": digest.hexdigest()}


def _content(value: Any) -> bytes:
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        # An image, which is read from its file when it is used, or is here.
        path = value["path"]
        value = value["bytes"] or (os.path.basename(path), os.path.getsize(path))
    return value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")


def describe_folder(folder: Path) -> str:
    """A digest of the files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def describe_origin(rows: Dataset, held_out: Dataset, processor: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """What a run depends on beside its settings.

    Args:
        rows: the training rows.
        held_out: the held-out rows.
        processor: folder of the tokenizer or processor.
        config: of the model.
    """
    model = json.loads(config.to_json_string(use_diff=False))
    return {
        "data": {"training": describe_rows(rows), "held-out": describe_rows(held_out)},
        "tokenizer": describe_folder(processor),
        "model": {name: value for name, value in model.items() if name not in _INCIDENTAL},
        "versions": package_versions(),
    }


def changes(begun: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two origins, but for the versions."""
    found = []
    for part, rows in now["data"].items():
        before = begun["data"][part]
        if rows["rows"] != before["rows"]:
            found.append(f"the {part} data had {before['rows']:,} rows, not {rows['rows']:,}")
        elif rows != before:
            found.append(f"the {part} data has the same number of rows ({rows['rows']:,}), but others")
    if now["tokenizer"] != begun["tokenizer"]:
        found.append("the tokenizer in the folder has been changed")
    found += [
        f"the model's `{name}` was {begun['model'].get(name)!r}, not {now['model'].get(name)!r}"
        for name in sorted(now["model"].keys() | begun["model"].keys())
        if begun["model"].get(name) != now["model"].get(name)
    ]
    return found


def version_changes(begun: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Which packages have another version than when the run began."""
    return [
        f"{name} was {begun['versions'].get(name)}, not {found}"
        for name, found in now["versions"].items()
        if begun["versions"].get(name) != found
    ]


def load_origin(folder: Path) -> dict[str, Any] | None:
    """What the run in a folder began with; None if it does not say."""
    file = folder / ORIGIN_FILE
    if not file.exists():
        return None
    origin = read_json(folder, ORIGIN_FILE, f"the run in {folder}")
    if not _is_whole(origin):
        raise ValueError(f"the run in {folder} has an {ORIGIN_FILE} that does not tell what it began with")
    return origin


def _is_whole(origin: dict[str, Any]) -> bool:
    if not all(isinstance(origin.get(name), dict) for name in ("data", "model", "versions")):
        return False
    parts = origin["data"]
    counted = all(isinstance(part, dict) and isinstance(part.get("rows"), int) for part in parts.values())
    return "tokenizer" in origin and parts.keys() == {"training", "held-out"} and counted


def save_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Writes what a run began with."""
    write_text(folder / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
