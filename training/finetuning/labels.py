"""Texts, lists and labels in the rows that a model is fine-tuned on, and the names of the labels."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..reading.tables import listed
from ..reading.typed_rows import Row

logger = logging.getLogger("regard.training")

# How many times as frequent as the rarest label the most frequent may be before a warning.
IMBALANCE = 10

# Values


def is_empty(value: Any) -> bool:
    """Returns whether a value is missing, or a text or list with nothing in it."""
    if isinstance(value, str):
        return not value.strip()
    # Missing numbers are NaN in the tables of pandas.
    return value is None or value == [] or value != value


def text_of(row: Row, column: str, where: str) -> str:
    """Returns the text in a column of a row, or "" if the value is missing.

    Raises:
        ValueError: if the value is something other than text.
    """
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} must hold text, not {type(value).__name__} ({repr(value)[:40]})")
    return value or ""


def list_of(row: Row, column: str, where: str, separator: str | None = "|") -> list[Any]:
    """Returns the list in a column of a row, which may be written as a JSON list or as a text with separators.

    Args:
        row: the values by column.
        column: name of the column.
        where: the place of the row, for the error.
        separator: the separator in a text; None splits at white space.

    Raises:
        ValueError: if the value is no list in any of these forms.
    """
    value = row[column]
    if isinstance(value, str):
        value = parse_json(value, column, where) if value.lstrip().startswith("[") else value.split(separator)
        value = [part.strip() if isinstance(part, str) else part for part in value if part != ""]
    if value is None:
        return []
    if not isinstance(value, list):
        kind = type(value).__name__
        raise ValueError(f"{where}: column {column!r} must hold a list, not {kind} ({repr(value)[:40]})")
    return value


def parse_json(text: str, column: str, where: str) -> Any:
    """Parses the JSON in a text, such as a cell of a CSV file.

    Raises:
        ValueError: if it does not parse; the error names the column and the place.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: column {column!r} does not parse as JSON ({error}): {text[:40]!r}") from None


# Labels


def label_name(value: Any, names: Sequence[str] | None, column: str, where: str) -> str:
    """Returns the name of a label.

    Args:
        value: the label: a name, a whole number (a float too, as pandas makes them of columns with missing values), or
            true or false.
        names: the names that the data declares for numbers; None if it declares none.
        column: the column of the label, for errors.
        where: the place of the row, for errors.

    Raises:
        ValueError: if the label is missing or cannot name a class.
    """
    if is_empty(value):
        raise ValueError(f"{where} has no label: column {column!r} is empty there; leave out rows without one")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if names is not None and isinstance(value, int):
        if not 0 <= value < len(names):
            raise ValueError(f"{where}: the label {value} in column {column!r} is none of {listed(names)}")
        return names[value]
    if isinstance(value, (str, int)):
        return str(value).strip()
    raise ValueError(
        f"{where}: a label in column {column!r} must be text or a whole number, not {type(value).__name__} "
        f"({repr(value)[:40]}); to predict numbers, choose the task 'regression'"
    )


def sort_names(names: Iterable[str]) -> list[str]:
    """Returns the different names in alphabetical order, or in numeric order if all are whole numbers."""
    unique = sorted(set(names))
    numeric = all(name.removeprefix("-").isdecimal() for name in unique)
    return sorted(unique, key=int) if numeric else unique


def require_known(names: Iterable[str], known: Sequence[str], column: str) -> None:
    """Raises a ValueError if held-out rows have labels that the training rows lack.

    Args:
        names: the labels of the held-out rows.
        known: the labels of the training rows.
        column: the column of the labels, for the error.
    """
    unseen = sort_names(set(names) - set(known))
    if unseen:
        shown = ", ".join(map(repr, unseen[:5])) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
        raise ValueError(
            f"`validation` has labels in column {column!r} that are unseen in training: {shown}; "
            f"the training data has {listed(known[:10])}{'' if len(known) <= 10 else ' and others'}"
        )


def warn_of_imbalance(counts: Counter[str]) -> None:
    """Warns if the most frequent label is more than `IMBALANCE` times as frequent as the rarest."""
    ranked = counts.most_common()
    if not ranked:
        return
    (most, highest), (least, lowest) = ranked[0], ranked[-1]
    if highest > IMBALANCE * lowest:
        logger.warning(
            "The labels are imbalanced: %s occurs %s times, %s %s. Accuracy says little then; look at `f1`.",
            *(repr(most), f"{highest:,}", repr(least), f"{lowest:,}"),
        )
