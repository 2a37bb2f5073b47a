"""The fingerprint of a run: all that its result depends on besides its settings.

When a run is resumed, comparing fingerprints finds what has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig

from ...modeling.loading.folder import read_json
from .files import write_text

ORIGIN_FILE = "origin.json"

# The digest covers at most this many rows, evenly spaced over the data.
SAMPLED_ROWS = 2**14
_ROWS_AT_ONCE = 256

# Fields of a configuration that do not describe the model.
_INCIDENTAL = ("transformers_version", "_name_or_path")


def package_versions() -> dict[str, str]:
    """The versions of the packages that training depends on."""
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")}


def describe_rows(rows: Dataset) -> dict[str, Any]:
    """The number of rows, and a digest of the content of up to `SAMPLED_ROWS` of them.

    The digest does not depend on the folder that the rows were read from.
    """
    # The source of a document is a path, which changes when the data is moved.
    columns = [name for name in rows.column_names if not (name == "source" and "text" in rows.column_names)]
    table = rows.select_columns(columns).with_format("arrow")
    number = min(len(rows), SAMPLED_ROWS)
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
        # An image: its bytes, or the path of a file that is read when the image is used.
        path = value["path"]
        value = value["bytes"] or (os.path.basename(path), os.path.getsize(path))
    return value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")


def describe_folder(folder: Path) -> str:
    """A digest of the names and contents of the files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)} ".encode())
            digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class RunFingerprint:
    """All that the result of a run depends on besides its settings.

    Attributes:
        data: number of rows and digest of the "training" and the "held-out" data.
        tokenizer: digest of the files of the tokenizer or processor.
        model: fields of the model's configuration.
        versions: versions of packages.
        accepted: changes that `accept_changes` has allowed since the run began, and the steps at which it was resumed
            with them; None if the run has never been compared.
    """

    data: dict[str, dict[str, Any]]
    tokenizer: str
    model: dict[str, Any]
    versions: dict[str, str]
    accepted: list[dict[str, Any]] | None = None

    @classmethod
    def take(cls, rows: Dataset, held_out: Dataset, processor: Path, config: PreTrainedConfig) -> RunFingerprint:
        """Takes the fingerprint of a run.

        Args:
            rows: the training rows.
            held_out: the held-out rows.
            processor: folder of the tokenizer or processor.
            config: configuration of the model.
        """
        model = json.loads(config.to_json_string(use_diff=False))
        return cls(
            data={"training": describe_rows(rows), "held-out": describe_rows(held_out)},
            tokenizer=describe_folder(processor),
            model={name: value for name, value in model.items() if name not in _INCIDENTAL},
            versions=package_versions(),
        )

    @classmethod
    def load(cls, folder: Path) -> RunFingerprint | None:
        """Loads the fingerprint that the run in a folder was started with; None if it has no such file.

        Raises:
            ValueError: if the file is incomplete.
        """
        if not (folder / ORIGIN_FILE).exists():
            return None
        saved = read_json(folder, ORIGIN_FILE, f"the run in {folder}")
        if not _is_complete(saved):
            raise ValueError(f"the run in {folder} has an {ORIGIN_FILE} that is incomplete")
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__ if name in saved})

    def save(self, folder: Path) -> None:
        """Saves the fingerprint in the folder of the run."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        write_text(folder / ORIGIN_FILE, json.dumps(values, indent=2) + "\n")

    def changes(self, now: RunFingerprint) -> list[str]:
        """Describes the differences to a later fingerprint, except those of versions."""
        found = []
        for part, rows in now.data.items():
            before = self.data[part]
            if rows["rows"] != before["rows"]:
                found.append(f"the {part} data had {before['rows']:,} rows, not {rows['rows']:,}")
            elif rows != before:
                found.append(f"the {part} data has the same number of rows ({rows['rows']:,}), but different ones")
        if now.tokenizer != self.tokenizer:
            found.append("the tokenizer in the folder has been changed")
        found += [
            f"the model's `{name}` was {self.model.get(name)!r}, not {now.model.get(name)!r}"
            for name in sorted(now.model.keys() | self.model.keys())
            if self.model.get(name) != now.model.get(name)
        ]
        return found

    def version_changes(self, now: RunFingerprint) -> list[str]:
        """Describes the packages that have another version in a later fingerprint."""
        return [
            f"{name} was {self.versions.get(name)}, not {found}"
            for name, found in now.versions.items()
            if self.versions.get(name) != found
        ]


def _is_complete(saved: dict[str, Any]) -> bool:
    if not all(isinstance(saved.get(name), dict) for name in ("data", "model", "versions")):
        return False
    parts = saved["data"]
    counted = all(isinstance(part, dict) and isinstance(part.get("rows"), int) for part in parts.values())
    return "tokenizer" in saved and parts.keys() == {"training", "held-out"} and counted
