"""The folder of a run.

settings.yaml   what the run was asked for
tokenizer/      fixed when the run starts
checkpoints/    the run's whole state at some steps
logs/           what the trackers write
history.jsonl   losses and figures by step
results.json    what the run came to, once it has ended
model/          the trained model and its tokenizer, loadable by transformers
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..modeling.model_folder import check_model_folder
from .settings import make_settings, read_yaml, to_dict

Settings = TypeVar("Settings")

SETTINGS_FILE, RESULTS_FILE = "settings.yaml", "results.json"
TOKENIZER, MODEL = "tokenizer", "model"


def open_run(
    folder: Path, settings_class: type[Settings], family: str, given: dict[str, Any], resume: bool
) -> Settings:
    """Starts a run in a new folder, or goes on with the one that it holds.

    Args:
        folder: of the run; made if it is not there.
        settings_class: of the family's settings.
        family: name of the family.
        given: the settings that were given, by name.
        resume: whether to go on with the run in the folder, or to start one if there is none.

    Returns:
        The run's settings: those given and the defaults, or those that the run was started with.

    Raises:
        ValueError: if the folder holds something else, or a run that was not to be resumed or has other settings.
    """
    file = folder / SETTINGS_FILE
    if not file.exists():
        settings = make_settings(settings_class, given)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"`output` ({folder}) holds something that is no run: choose another folder")
        return settings
    if not resume:
        raise ValueError(f"`output` ({folder}) holds another run: choose another folder, or `resume` to go on with it")
    saved = read_yaml(file)
    saved_family = saved.pop("family", None)
    if saved_family != family:
        raise ValueError(f"`output` ({folder}) holds a run of {saved_family!r}, not of {family!r}")
    settings = make_settings(settings_class, saved)
    begun, asked = to_dict(settings), to_dict(make_settings(settings_class, {**saved, **given}))
    differing = [f"`{name}` was {begun[name]!r}, not {asked[name]!r}" for name in given if asked[name] != begun[name]]
    if differing:
        raise ValueError(f"the run in {folder} can't go on with other settings: {'; '.join(differing)}")
    return settings


def save_settings(folder: Path, family: str, settings: Any) -> None:
    """Writes the settings that mark a folder as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"family": family, **to_dict(settings)}, sort_keys=False, allow_unicode=True)
    _write(folder / SETTINGS_FILE, text)


def save_results(folder: Path, results: dict[str, Any]) -> None:
    """Writes what a run came to."""
    _write(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    # Renamed in, so that a run that is killed meanwhile leaves the whole file or none.
    partial = file.with_name(f"partial-{file.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def load_results(folder: Path) -> dict[str, Any] | None:
    """Reads what a run came to; None if it has not ended."""
    file = folder / RESULTS_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def model_path(model: str | Path) -> str:
    """The model of a run, if `model` is the folder of one; else `model` itself, a folder or a Hub id.

    Raises:
        ValueError: if it is a folder that holds no model, such as a run that has not ended, or one that can't be read
            or is not to be trusted; see `check_model_folder`.
    """
    folder = Path(model)
    if (folder / MODEL / "config.json").is_file():
        folder = folder / MODEL
    elif not folder.is_dir():
        return str(model)
    elif not (folder / "config.json").is_file():
        raise ValueError(f"`model` ({model}) holds no model: the run may not have ended (`--resume` goes on with it)")
    check_model_folder(folder, f"`model` ({model})")
    return str(folder)


@contextmanager
def naming_the_model(argument: str, model: str | Path, path: str) -> Iterator[None]:
    """Says in one line that there is no such model, where transformers says what it tried.

    Args:
        argument: what named the model.
        model: as the user named it.
        path: that it is loaded from.

    Raises:
        ValueError: for an OSError of what is neither a folder here nor a model of the Hub.
    """
    try:
        yield
    except OSError as error:
        if Path(path).exists():
            raise
        raise ValueError(f"`{argument}` ({model}) is no folder here, and the Hub did not give it: {error}") from None
