"""Reading YAML files of settings, which may come from untrusted sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Errors of `yaml.safe_load`. Those that are no YAMLError come from the values that it builds: a date that does not
# exist, a number with too many digits, a tag that does not fit its value, or brackets that are nested too deeply.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)


# Far more than any settings hold.
_MOST_PARTS = 100_000


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads settings from a YAML file.

    Raises:
        ValueError: if the file can't be read, is not YAML (the error names the line), or is not a mapping.
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
    """Raises if a value has too many parts. Aliases let a short YAML file stand for a huge or endless value.

    Args:
        value: the value that was read.
        label: name of its source, for the error.

    Raises:
        ValueError: if the value has more than `_MOST_PARTS` parts.
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
