"""Reading YAML files of settings that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# What `yaml` raises, which lets through those of what it builds: of a date that there is not, a number of too many
# digits, a tag that does not suit its value, or brackets in brackets without end.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)


# Far more than any settings hold.
_MOST_PARTS = 100_000


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads settings from a YAML file.

    Raises:
        ValueError: if it is not there, does not parse (with the line), or is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings file {path} can't be read: {error}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ValueError(f"{path}{where} is not YAML: {problem}") from None
    except YAML_ERRORS as error:
        raise ValueError(f"{path} holds a value that YAML can't read: {error}") from None
    if values is None:
        return {}
    require_small(values, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings as `name: value`, but it holds a {type(values).__name__}")
    return values


def require_small(value: Any, label: str) -> None:
    """Refuses what is short as YAML, by aliases, but without end or nearly so when it is written out.

    Raises:
        ValueError: if it has more parts than any settings have.
    """
    rest, number = [value], 0
    while rest:
        part = rest.pop()
        number += 1
        if number > _MOST_PARTS:
            raise ValueError(f"{label} holds more than {_MOST_PARTS:,} values, written out: use no aliases")
        if isinstance(part, dict):
            rest += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set)):
            rest += part
