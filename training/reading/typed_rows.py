"""Rows whose columns hold values of any type, such as the labels that a model is fine-tuned on; all are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from datasets import ClassLabel, LargeList, List

from .sources import find_tables, hub_features, hub_rows, is_data_set_id, open_hub_data_set
from .tables import Column, declared_features, find_column, listed, read_values

Row: TypeAlias = dict[str, Any]
LabelNames: TypeAlias = dict[str, list[str]]  # by column, in the order of their numbers

_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Table(NamedTuple):
    """Rows and where they are from.

    Attributes:
        rows: the values of each row, by column.
        places: the place of each row: its file and line, or its data set and number.
        label_names: the names that the data declares for the numbers in a column, or in its lists; by column.
    """

    rows: list[Row]
    places: list[str]
    label_names: LabelNames


def load_table(names: Sequence[str], columns: Sequence[Column], split: str, argument: str = "data") -> Table:
    """Reads columns of tables and of data sets on the Hub, and joins their rows.

    Args:
        names: files, folders of files, globs and data sets on the Hub. A file that is found twice is read once.
        columns: the columns to read.
        split: the split of data sets on the Hub.
        argument: the argument that gave the names, for errors.

    Raises:
        ValueError: if nothing has one of the names, a file does not parse, a column is missing or holds values of
            different kinds, or there are no rows.
    """
    if not names:
        raise ValueError(
            f"`{argument}` names no source: give a table (csv, tsv, json, jsonl, parquet) or a data set of the Hub"
        )
    parts: list[Table] = []
    seen: set[str] = set()
    for name in names:
        if is_data_set_id(name):
            parts.append(_read_hub(name, columns, split, argument))
        else:
            parts += [_read_file(file.name, columns) for file in find_tables(name, seen, argument=argument)]
    parts = [part for part in parts if part.rows]
    if not parts:
        raise ValueError(f"`{argument}` ({listed(names)}) has no rows")
    rows, places, label_names = parts[0]
    for part in parts[1:]:
        if part.label_names != label_names:
            raise ValueError(
                f"the labels in {part.places[0]} have other names than those in {places[0]}: "
                f"{part.label_names or 'none'}, not {label_names or 'none'}"
            )
        rows += part.rows
        places += part.places
    for column in columns:
        _require_one_kind(zip(places, (row[column.name] for row in rows), strict=True), column.name)
    return Table(rows, places, label_names)


def _read_file(file: str, columns: Sequence[Column]) -> Table:
    places, rows = [], []
    for where, values in read_values(file, columns):
        places.append(where)
        rows.append({column.name: value for column, value in zip(columns, values, strict=True)})
    return Table(rows, places, _label_names(declared_features(file, columns)))


def _read_hub(name: str, columns: Sequence[Column], split: str, argument: str) -> Table:
    data_set, _ = open_hub_data_set(name, split, argument=argument)
    places, rows = [], []
    for where, row in hub_rows(data_set, columns, name):
        places.append(where)
        rows.append({column.name: find_column(column, row, where) for column in columns})
    features = hub_features(data_set)
    return Table(rows, places, _label_names({each.name: find_column(each, features, name) for each in columns}))


def _label_names(features: dict[str, Any]) -> LabelNames:
    """Returns the names of the labels that features declare, by column."""
    names = {}
    for column, feature in features.items():
        while isinstance(feature, (List, LargeList)):
            feature = feature.feature
        if isinstance(feature, ClassLabel):
            names[column] = list(feature.names)
    return names


def _require_one_kind(values: Iterable[tuple[str, Any]], column: str) -> None:
    kinds: dict[str, str] = {}
    for place, value in values:
        outer, inner = ("a list with ", value) if isinstance(value, list) else ("", [value])
        for part in inner:
            if part is not None:
                kinds.setdefault(outer + _KINDS.get(type(part), type(part).__name__), place)
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} ({place})" for kind, place in kinds.items())
        raise ValueError(f"column {column!r} must hold values of one kind, not {shown}")
