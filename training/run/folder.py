"""The folder of a run.

settings.yaml   what the run was asked for
origin.json     what it began with: digests of the data and the tokenizer, the model's configuration, versions
tokenizer/      fixed when the run starts
checkpoints/    the run's whole state at some steps
logs/           what the trackers write
history.jsonl   losses and figures by step
results.json    what the run came to, once it has ended
model/          the trained model and its tokenizer, loadable by transformers
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ...modeling.loading.folder import read_json
from .files import PARTIAL, WRITE_ERRORS, not_written, write_text
from .settings import make_settings, to_dict
from .settings_file import read_yaml

logger = logging.getLogger("regard.training")

Settings = TypeVar("Settings")

SETTINGS_FILE, RESULTS_FILE = "settings.yaml", "results.json"
TOKENIZER = "tokenizer"


def open_run(
    folder: Path,
    settings_class: type[Settings],
    family: str,
    given: dict[str, Any],
    resume: bool,
    accept_changes: bool | None = None,
) -> Settings:
    """Starts a run in a new folder, or goes on with the one that it holds.

    Args:
        folder: of the run; made if it is not there.
        settings_class: of the family's settings.
        family: name of the family.
        given: the settings that were given, by name.
        resume: whether to go on with the run in the folder, or to start one if there is none.
        accept_changes: whether settings that are given go before those that the run was started with; None: they
            can't.

    Returns:
        The run's settings: those given and the defaults, or those that the run was started with.

    Raises:
        ValueError: if the folder holds something else, or a run that was not to be resumed or has other settings.
    """
    file = folder / SETTINGS_FILE
    if not file.exists():
        settings = make_settings(settings_class, given)
        # A run that was killed before its settings were written has not begun.
        begun = f"{PARTIAL}{SETTINGS_FILE}"
        if folder.exists() and (not folder.is_dir() or any(path.name != begun for path in folder.iterdir())):
            raise ValueError(f"`output` ({folder}) holds something that is no run: choose another folder")
        return settings
    if not resume:
        raise ValueError(f"`output` ({folder}) holds another run: choose another folder, or `resume` to go on with it")
    saved = read_yaml(file)
    saved_family = saved.pop("family", None)
    if saved_family != family:
        raise ValueError(f"`output` ({folder}) holds a run of {saved_family!r}, not of {family!r}")
    settings = make_settings(settings_class, saved)
    asked = make_settings(settings_class, {**saved, **given})
    differing = setting_changes(settings, asked)
    if differing and not accept_changes:
        hint = "" if accept_changes is None else " (`accept_changes` lets it)"
        raise ValueError(f"the run in {folder} can't go on with other settings{hint}: {'; '.join(differing)}")
    return asked


def setting_changes(begun: Any, asked: Any) -> list[str]:
    """Which settings differ."""
    before = to_dict(begun)
    return [
        f"`{name}` was {before[name]!r}, not {value!r}"
        for name, value in to_dict(asked).items()
        if value != before[name]
    ]


def load_settings(folder: Path, settings_class: type[Settings]) -> Settings:
    """Reads the settings that a run was started with."""
    saved = read_yaml(folder / SETTINGS_FILE)
    saved.pop("family", None)
    return make_settings(settings_class, saved)


def save_settings(folder: Path, family: str, settings: Any) -> None:
    """Writes the settings that mark a folder as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"family": family, **to_dict(settings)}, sort_keys=False, allow_unicode=True)
    write_text(folder / SETTINGS_FILE, text)


def save_results(folder: Path, results: dict[str, Any]) -> None:
    """Writes what a run came to."""
    text = json.dumps(json_safe(results), indent=2, allow_nan=False)
    write_text(folder / RESULTS_FILE, text + "\n")


def json_safe(value: Any) -> Any:
    """The same with None for each number that is not finite, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: json_safe(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_results(folder: Path) -> dict[str, Any] | None:
    """Reads what a run came to, its figures that are no number as NaN; None if it has not ended."""
    file = folder / RESULTS_FILE
    if not file.exists():
        return None
    results = read_json(folder, RESULTS_FILE, f"the run in {folder}")
    metrics = results.get("metrics", {})
    if not isinstance(metrics, dict):
        raise ValueError(f"the run in {folder} has a {RESULTS_FILE} whose `metrics` are no JSON object")
    results["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
    return results


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Says in one line what could not be written.

    Args:
        what: is written.
        folder: where to.

    Raises:
        OSError: for an error of the disk.
    """
    try:
        yield
    except WRITE_ERRORS as error:
        raise not_written(what, folder, error) from error
