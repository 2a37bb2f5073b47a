"""The folder of a run.

settings.yaml   the settings of the run
origin.json     the run's fingerprint: digests of data and tokenizer, the model's configuration, versions of packages
tokenizer/      the tokenizer, fixed when the run starts
checkpoints/    the complete state of the run at some steps
logs/           logs of the trackers
history.jsonl   losses and metrics by step
results.json    the results, once the run has ended
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
    """Determines the settings of a new run, or of a run that is resumed. Writes nothing.

    Args:
        folder: folder of the run; it need not exist.
        settings_class: class of the family's settings.
        family: name of the family.
        given: the given settings, by name.
        resume: whether to resume the run in the folder. Without a run there, a new one is started.
        accept_changes: whether given settings may differ from those that the run was started with, and replace them.
            None: they may not, and the error does not name this option.

    Returns:
        The settings of the run: the defaults, or those that the run was started with, updated with the given ones.

    Raises:
        ValueError: if the folder holds something other than a run, a run of another family, a run although `resume` is
            False, or a run with other settings that are not accepted.
    """
    file = folder / SETTINGS_FILE
    if not file.exists():
        settings = make_settings(settings_class, given)
        # A run that was killed before its settings were written has not begun.
        begun = f"{PARTIAL}{SETTINGS_FILE}"
        if folder.exists() and (not folder.is_dir() or any(path.name != begun for path in folder.iterdir())):
            raise ValueError(f"`output` ({folder}) holds something other than a run: choose another folder")
        return settings
    if not resume:
        raise ValueError(f"`output` ({folder}) holds another run: choose another folder, or `resume` to continue it")
    saved = read_yaml(file)
    saved_family = saved.pop("family", None)
    if saved_family != family:
        raise ValueError(f"`output` ({folder}) holds a run of {saved_family!r}, not of {family!r}")
    settings = make_settings(settings_class, saved)
    asked = make_settings(settings_class, {**saved, **given})
    differing = setting_changes(settings, asked)
    if differing and not accept_changes:
        hint = "" if accept_changes is None else " (`accept_changes` allows it)"
        raise ValueError(f"the run in {folder} can't go on with other settings{hint}: {'; '.join(differing)}")
    return asked


def setting_changes(begun: Any, asked: Any) -> list[str]:
    """Describes the settings that differ."""
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
    """Writes the settings file, which marks a folder as a run; makes the folder if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"family": family, **to_dict(settings)}, sort_keys=False, allow_unicode=True)
    write_text(folder / SETTINGS_FILE, text)


def save_results(folder: Path, results: dict[str, Any]) -> None:
    """Writes the results of a run."""
    text = json.dumps(json_safe(results), indent=2, allow_nan=False)
    write_text(folder / RESULTS_FILE, text + "\n")


def json_safe(value: Any) -> Any:
    """The same value with None for each number that is not finite, since JSON can't represent it."""
    if isinstance(value, dict):
        return {name: json_safe(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_results(folder: Path) -> dict[str, Any] | None:
    """Reads the results of a run, with metrics that are null as NaN.

    Returns:
        The results; None if the run has not ended.

    Raises:
        ValueError: if the file is invalid.
    """
    file = folder / RESULTS_FILE
    if not file.exists():
        return None
    results = read_json(folder, RESULTS_FILE, f"the run in {folder}")
    metrics = results.get("metrics", {})
    if not isinstance(metrics, dict):
        raise ValueError(f"the run in {folder} has a {RESULTS_FILE} whose `metrics` are not a JSON object")
    results["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
    return results


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """A context that turns each error of writing into an OSError of one line.

    Args:
        what: words for what is written, such as "the model".
        folder: folder that it is written to.

    Raises:
        OSError: if writing fails.
    """
    try:
        yield
    except WRITE_ERRORS as error:
        raise not_written(what, folder, error) from error
