"""Rows to fine-tune on, from tables and the Hub: texts, and the names of their labels."""

from __future__ import annotations

import glob
import json
import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet
from datasets import ClassLabel, Dataset, LargeList, List, concatenate_datasets
from datasets.exceptions import DatasetGenerationError

from ..reading.tables import (
    TABLE_SUFFIXES,
    Column,
    is_data_set_id,
    is_table,
    list_folder,
    listed,
    naming_the_parquet_file,
    num_bytes,
    open_hub_data_set,
    read_table,
    suffix_of,
)
from ..reading.text_files import naming_the_file, open_text

logger = logging.getLogger("regard.training")

# Rare labels are learnt badly where others are so many times as frequent.
IMBALANCE = 10

Row = dict[str, Any]


class Table(NamedTuple):
    """Rows, and the files or data sets that they are from, each with its number of rows."""

    rows: Dataset
    sources: list[tuple[str, int]]

    def places(self) -> Iterator[str]:
        """Where each row is, as errors name it."""
        return (f"{name}, row {number}" for name, size in self.sources for number in range(1, size + 1))


# Reading


def read_rows(name: str, columns: Sequence[Column], split: str, argument: str = "data") -> Table:
    """Reads some columns of a table or of a data set on the Hub.

    Args:
        name: of a file, a folder of files, a glob or a data set on the Hub.
        columns: to read.
        split: of a data set on the Hub.
        argument: what named it, for the errors.

    Raises:
        ValueError: if there is nothing of that name, it does not parse, has no rows or lacks a column.
    """
    if is_data_set_id(name):
        rows, _ = open_hub_data_set(name, split, argument=argument)
        read = _select(rows, columns, f"the data set {name!r}")
        parts = [Table(read, [(name, len(read))])]
    else:
        files = _find_files(name, argument)
        parts = [Table(read, [(file, len(read))]) for file in files for read in [_read_file(file, columns)]]
    return _join(parts, f"`{argument}` ({name!r})")


def _join(parts: list[Table], label: str) -> Table:
    try:
        rows = concatenate_datasets([part.rows for part in parts])
    except (ValueError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        kinds = "; ".join(sorted({str(dict(part.rows.features)) for part in parts}))
        raise ValueError(f"{label}: the files hold different types of columns ({kinds}): {error}") from None
    if not len(rows):
        raise ValueError(f"{label} has no rows")
    return Table(rows, [source for part in parts for source in part.sources])


def _find_files(name: str, argument: str) -> list[str]:
    if os.path.isdir(name):
        files = [path for path in list_folder(name) if is_table(path)]
    elif os.path.exists(name):
        files = [name]
    else:
        files = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
    if not files:
        raise ValueError(
            f"`{argument}` ({name!r}) is no table, folder of tables, glob or data set id (org/name): "
            "there is nothing of that name"
        )
    for file in files:
        if not is_table(file):
            raise ValueError(f"`{argument}` ({file!r}) must be a table: {', '.join(TABLE_SUFFIXES)}")
    return files


def _read_file(file: str, columns: Sequence[Column]) -> Dataset:
    suffix = suffix_of(file)
    if suffix in (".csv", ".tsv"):
        # All that such a file holds is text: "NA" and "007" stay what they are.
        texts = [values for _, values in read_table(file, columns)]
        if not texts:
            raise ValueError(f"{file!r} has no rows")
        parts = zip(*texts, strict=True)
        return Dataset.from_dict({column.name: list(part) for column, part in zip(columns, parts, strict=True)})
    return _select(_read_parquet(file) if suffix == ".parquet" else _read_json(file, columns), columns, repr(file))


def _read_parquet(file: str) -> Dataset:
    with naming_the_parquet_file(file):
        if not pa.parquet.read_metadata(file).num_rows:
            raise ValueError(f"{file!r} has no rows")
    try:
        return Dataset.from_parquet(file)
    except (DatasetGenerationError, pa.ArrowException, ValueError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{file!r} does not read as Parquet: {reason}") from None


def _read_json(file: str, columns: Sequence[Column]) -> Dataset:
    # Not by the reader of `datasets`, which takes a text that looks like a date for one.
    with naming_the_file(file), open_text(file) as lines:
        if suffix_of(file) == ".json" and (text := lines.read()).lstrip().startswith("["):
            rows = _parse(text, file, "a list of objects")
        else:
            lines.seek(0)
            places = enumerate(lines, start=1)
            rows = [_parse(line, f"{file}:{number}", "one object a line") for number, line in places if line.strip()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{file!r}: row {number} must be a JSON object, not {repr(row)[:40]}")
    if not rows:
        raise ValueError(f"{file!r} has no rows")
    # A column need not be in every row.
    names = list(dict.fromkeys(name for row in rows for name in row))
    for column in columns:
        require_column(column, names, repr(file))
    values = {column.name: [row.get(column.name) for row in rows] for column in columns}
    try:
        return Dataset.from_dict(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        for name, column_values in values.items():
            _require_one_kind(column_values, f"{file!r}: column {name!r}")
            for number, value in enumerate(column_values, start=1):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                num_bytes(text, f"{file!r}, row {number}, column {name!r}")
        raise ValueError(f"{file!r} holds what a table can't: {error}") from None


_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def _require_one_kind(values: Sequence[Any], label: str) -> None:
    kinds: dict[str, int] = {}
    for number, value in enumerate(values, start=1):
        outer, inner = ("a list with ", value) if isinstance(value, list) else ("", [value])
        for part in inner:
            if part is not None:
                kinds.setdefault(outer + _KINDS[type(part)], number)
    if len(kinds) > 1:
        told = ", ".join(f"{kind} (row {number})" for kind, number in kinds.items())
        raise ValueError(f"{label} must hold values of one kind, not {told}")


def _parse(text: str, where: str, form: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} does not parse as JSON ({form}): {error}") from None


def _select(rows: Dataset, columns: Sequence[Column], label: str) -> Dataset:
    for column in columns:
        require_column(column, rows.column_names, label)
    return rows.select_columns(list(dict.fromkeys(column.name for column in columns)))


def require_column(column: Column, names: Sequence[str], label: str) -> None:
    """Refuses a table that lacks a column.

    Raises:
        ValueError: naming those that it has.
    """
    if column.name not in names:
        argument = f"`{column.argument}` can be" if column.argument is not None else "it has"
        raise ValueError(f"{label} has no column {column.name!r}; {argument} {listed(names)}")


def load_tables(
    data: Sequence[str], validation: str | None, columns: Sequence[Column], *, split: str, validation_split: str
) -> tuple[Table, Table | None]:
    """The rows to train on and those held out.

    Args:
        data: sources of the rows to train on.
        validation: source of those held out; None if there is none.
        columns: to read.
        split: of the Hub's data sets to train on.
        validation_split: of one that `validation` names.

    Raises:
        ValueError: if there is no source, or one that won't do.
    """
    if not data:
        raise ValueError("`data` names no source: give a table (csv, tsv, jsonl, parquet) or a data set of the Hub")
    rows = _join([read_rows(name, columns, split) for name in data], f"`data` ({listed(data)})")
    return rows, None if validation is None else read_rows(validation, columns, validation_split, "validation")


def draw(groups: Sequence[Hashable], share: float, seed: int) -> list[int]:
    """Draws a share of each group, by place: at least one row in all, and never the whole of a group.

    Raises:
        ValueError: if there is nothing to draw.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    rng = random.Random(f"held out {seed}")
    # Shuffled within the groups and spread evenly over them: what is held out has their shares, to the row.
    spread = []
    for members in places.values():
        rng.shuffle(members)
        spread += [((rank + 0.5) / len(members), place) for rank, place in enumerate(members[:-1])]
    if not spread:
        if len(groups) == 1:
            raise ValueError(f"`data` has 1 usable row, too few to hold one out (`validation` is {share:g}) and train")
        raise ValueError(
            f"`data` has {len(groups)} usable rows, each with another label: none can be held out "
            f"(`validation` is {share:g}) whose label is learnt from the others"
        )
    number = max(1, round(share * len(groups)))
    return sorted(place for _, place in sorted(spread)[:number])


# Values


def is_empty(value: Any) -> bool:
    """Whether a value is missing, or a text or list with nothing in it."""
    if isinstance(value, str):
        return not value.strip()
    # Missing numbers are NaN in the tables of pandas.
    return value is None or value == [] or value != value


def text_of(row: Row, column: str, where: str) -> str:
    """A row's text; "" where there is none.

    Raises:
        ValueError: if it holds something else.
    """
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} must hold text, not {type(value).__name__} ({repr(value)[:40]})")
    return value or ""


def list_of(row: Row, column: str, where: str, separator: str | None = "|") -> list[Any]:
    """A row's list: as it is, a JSON list, or a text's parts.

    Args:
        row: of the table.
        column: of the row.
        where: the row is, for the error.
        separator: of the parts; None: white space.

    Raises:
        ValueError: if it is none of these.
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
    """What a cell of a CSV file holds as JSON.

    Raises:
        ValueError: if it does not parse.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: column {column!r} does not parse as JSON ({error}): {text[:40]!r}") from None


# Labels


def declared_names(feature: Any) -> list[str] | None:
    """The names that a data set declares for the numbers of a column, or of the lists in it; None if it does not."""
    while isinstance(feature, (List, LargeList)):
        feature = feature.feature
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def label_name(value: Any, names: Sequence[str] | None, column: str, where: str) -> str:
    """The name of a row's label.

    Args:
        value: a name, a whole number (also where missing ones made it a float), or true or false.
        names: of the numbers, if they are declared.
        column: that held it.
        where: the row is.

    Raises:
        ValueError: if there is no label, or it can't name a class.
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
    """Names in alphabetical order, or by number if all are whole numbers."""
    unique = sorted(set(names))
    numeric = all(name.removeprefix("-").isdecimal() for name in unique)
    return sorted(unique, key=int) if numeric else unique


def require_known(names: Iterable[str], known: Sequence[str], column: str) -> None:
    """Refuses labels of the held-out rows that there are none of to learn from.

    Raises:
        ValueError: naming them.
    """
    unseen = sort_names(set(names) - set(known))
    if unseen:
        shown = ", ".join(map(repr, unseen[:5])) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
        raise ValueError(
            f"`validation` has labels in column {column!r} that are unseen in training: {shown}; "
            f"the training data has {listed(known[:10])}{'' if len(known) <= 10 else ' and others'}"
        )


def warn_of_imbalance(counts: Counter[str]) -> None:
    """Warns if the most frequent label is more than ten times as frequent as the least frequent."""
    ranked = counts.most_common()
    if not ranked:
        return
    (most, highest), (least, lowest) = ranked[0], ranked[-1]
    if highest > IMBALANCE * lowest:
        logger.warning(
            "The labels are imbalanced: %s occurs %s times, %s %s. Accuracy says little then; look at `f1`.",
            *(repr(most), f"{highest:,}", repr(least), f"{lowest:,}"),
        )
