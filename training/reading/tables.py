"""The one reader of tables: JSON, CSV and Parquet files, row by row, with the place of each row."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet
from datasets import Features

from .bad_records import BadRecords
from .text_files import num_bytes, read_lines, require_utf8

MAX_DOCUMENT_BYTES = 2**27
# In characters. A line of JSON may write each character of a document as six.
MAX_LINE = 4 * MAX_DOCUMENT_BYTES

_PARQUET_ROWS = 500
_JSON_SPACE = re.compile(r"[ \t\n\r]*")

_PARQUET_ERRORS = (pa.ArrowException, OverflowError, OSError)

Rows: TypeAlias = Iterator[tuple[str, tuple[str, ...]]]  # the place of each row, its texts
Objects: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]  # the place of each row, its columns


class Column(NamedTuple):
    """A column that is read.

    Attributes:
        name: its name; the column `inner` inside of `outer` is called `outer.inner`.
        argument: the argument that names the column, for errors; None if its name is fixed.
    """

    name: str
    argument: str | None = None


def suffix_of(name: str) -> str:
    """Returns the suffix that shows the kind of a file, in lower case and without `.gz`."""
    return Path(name.lower().removesuffix(".gz")).suffix


def is_table(name: str) -> bool:
    """Returns whether a file is a table by its name."""
    return suffix_of(name) in _TABLE_READERS


def read_table(name: str, columns: Sequence[Column], bad: BadRecords | None = None) -> Rows:
    """Reads columns of texts from a file that `is_table`.

    Args:
        name: name of the file.
        columns: the columns that every row must have.
        bad: receives the rows that cannot be read, and counts a file that is damaged from some place on as one; None
            stops at the first. A column that is missing in a header or schema is an error in any case.

    Yields:
        The file and line (of a Parquet file: row) of each row, from 1; and the row's texts, in the order of `columns`.

    Raises:
        ValueError: if the file does not parse, or a column is missing or holds something other than text.
    """
    bad = bad or BadRecords()
    return texts_of(_TABLE_READERS[suffix_of(name)](name, columns, bad), columns, bad)


def read_values(name: str, columns: Sequence[Column]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Reads columns of any values from a file that `is_table`, and stops at the first row that cannot be read.

    All cells of a CSV file are texts: "NA" and "007" stay what they are. JSON objects may lack a column that others
    of the file have; its value is None then.

    Args:
        name: name of the file.
        columns: the columns to read.

    Yields:
        The place of each row as `read_table` yields it, and the row's values, in the order of `columns`.

    Raises:
        ValueError: if the file does not parse, or no row has one of the columns.
    """
    if suffix_of(name) in (".csv", ".tsv"):
        yield from read_table(name, columns)
        return
    missing: dict[Column, ValueError] = {}
    found: set[Column] = set()
    for where, row in _TABLE_READERS[suffix_of(name)](name, columns, BadRecords()):
        values = []
        for column in columns:
            try:
                values.append(find_column(column, row, where))
                found.add(column)
            except ValueError as error:
                missing.setdefault(column, error)
                values.append(None)
        for value in values:
            num_bytes(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), where)
        yield where, tuple(values)
    for column, first in missing.items():
        if column not in found:
            raise first


def declared_features(name: str, columns: Sequence[Column]) -> dict[str, Any]:
    """Returns the features that a Parquet file declares for columns, such as the names of its labels.

    Other files declare none.

    Raises:
        ValueError: if a column is missing, or has a type that `datasets` does not know.
    """
    if suffix_of(name) != ".parquet":
        return {}
    try:
        schema = pa.parquet.read_schema(name)
        outermost = outer_columns(columns, _schema_columns(schema))
        chosen = pa.schema([field for field in schema if field.name in outermost], schema.metadata)
        features = Features.from_arrow_schema(chosen)
    except (*_PARQUET_ERRORS, ValueError) as error:
        raise _not_parquet(repr(name), error) from None
    return {column.name: find_column(column, features, name) for column in columns}


# JSON


def _read_json(name: str, columns: Sequence[Column], bad: BadRecords) -> Objects:
    lines = read_lines(name, bad, MAX_LINE)
    for number, line in lines:
        if not line.isspace():
            is_list = suffix_of(name) == ".json" and line.lstrip().startswith("[")
            read = _read_json_list if is_list else _read_json_lines
            yield from read(name, chain([(number, line)], lines), bad)


def _read_json_lines(name: str, lines: Iterable[tuple[int, str]], bad: BadRecords) -> Objects:
    def parse(item: tuple[int, str]) -> tuple[str, dict[str, Any]]:
        number, line = item
        where = f"{name}:{number}"
        require_utf8(line, where, name, bad)
        if len(line) > MAX_LINE:
            raise ValueError(f"{where}: a line of more than {MAX_LINE:,} characters")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} does not parse as JSON (one object a line): {error}") from None
        return where, _require_object(row, where)

    return bad.parse_each((line for line in lines if not line[1].isspace()), parse)


def _read_json_list(name: str, lines: Iterable[tuple[int, str]], bad: BadRecords) -> Objects:
    """Reads a list of objects. Its whole text is in memory; what follows a mistake in its syntax is lost."""
    first, text = _joined(lines)
    if len(text) > MAX_LINE:
        bad.add(ValueError(f"{name}: a list of more than {MAX_LINE:,} characters; write one object a line instead"))
        return

    def parse(element: tuple[int, str, Any]) -> tuple[str, dict[str, Any]]:
        line, source, row = element
        where = f"{name}:{first + line}"
        require_utf8(source, where, name, bad)
        return where, _require_object(row, where)

    try:
        yield from bad.parse_each(_list_elements(text), parse)
    except json.JSONDecodeError as error:
        where = f"{name}:{first + error.lineno - 1}"
        bad.add(ValueError(f"{where} does not parse as JSON (a list of objects): {error.msg}"))


def _joined(lines: Iterable[tuple[int, str]]) -> tuple[int, str]:
    """Joins lines, but no more of them than exceed `MAX_LINE`; returns the number of the first with the text."""
    first, parts, size = 0, [], 0
    for number, line in lines:
        first = first or number
        if size <= MAX_LINE:
            parts.append(line)
            size += len(line)
    return first, "".join(parts)


def _list_elements(text: str) -> Iterator[tuple[int, str, Any]]:
    """Yields the line, from 0, the text and the value of each element of a JSON list."""
    decode = json.JSONDecoder().raw_decode
    place, line, counted = text.index("["), 0, 0  # the place of the bracket, then of each comma
    while True:
        start = _next(text, place + 1)
        if text[place] == "[" and text[start : start + 1] == "]":
            place = start
            break
        line, counted = line + text.count("\n", counted, start), start
        try:
            value, end = decode(text, start)
        except RecursionError as error:
            raise json.JSONDecodeError(str(error), text, start) from None
        yield line, text[start:end], value
        place = _next(text, end)
        if text[place : place + 1] == "]":
            break
        if text[place : place + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    if _next(text, place + 1) < len(text):
        raise json.JSONDecodeError("Extra data", text, _next(text, place + 1))


def _next(text: str, place: int) -> int:
    """The first place from one on that holds no white space of JSON."""
    match = _JSON_SPACE.match(text, place)
    assert match is not None
    return match.end()


def _require_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, not {_shown(row)}")
    return row


# CSV and Parquet


def _read_csv(name: str, columns: Sequence[Column], bad: BadRecords) -> Objects:
    # The default limit, 128 KiB for the whole process, is less than a long article.
    csv.field_size_limit(max(MAX_DOCUMENT_BYTES, csv.field_size_limit()))
    dialect = "excel-tab" if suffix_of(name) == ".tsv" else "excel"
    damage: list[ValueError] = []  # in the lines of the present row

    def lines() -> Iterator[str]:
        for number, line in read_lines(name, bad, MAX_LINE, newline=""):
            where = f"{name}:{number}"
            try:
                require_utf8(line, where, name, bad)
                if len(line) > MAX_LINE:
                    raise ValueError(f"{where}: a line of more than {MAX_LINE:,} characters")
            except ValueError as error:
                if bad.stops:
                    raise
                damage.append(error)
            yield line

    reader = csv.DictReader(lines(), dialect=dialect, strict=True)
    line = 1
    try:
        header = reader.fieldnames or ()
        if damage:
            raise damage[0]
        line = reader.reader.line_num + 1
        for column in columns if header else ():
            find_column(column, dict.fromkeys(header), f"{name}:{line}")
            if header.count(column.name) > 1:
                raise ValueError(
                    f"{name} has {header.count(column.name)} columns {column.name!r}: rename or remove one"
                )
    except csv.Error as error:
        raise ValueError(f"{name}:{line} does not parse as CSV ({dialect}): {error}") from None
    while True:
        try:
            row = next(reader, None)
            if damage:
                raise damage[0]
            if row is not None and None in row:
                raise ValueError(f"{name}:{line} has more fields than the header, {listed(header)}")
        except csv.Error as error:
            last = reader.reader.line_num
            lost = f" (and with it the lines up to {last:,})" if last > line else ""
            bad.add(ValueError(f"{name}:{line} does not parse as CSV ({dialect}): {error}{lost}"))
        except ValueError as error:
            bad.add(error)
        else:
            if row is None:
                return
            yield f"{name}:{line}", row
        damage.clear()
        line = reader.reader.line_num + 1


def _read_parquet(name: str, columns: Sequence[Column], bad: BadRecords) -> Objects:
    try:
        table = pa.parquet.ParquetFile(name, pre_buffer=False)  # a buffer that would grow to the whole column
    except _PARQUET_ERRORS as error:
        bad.add(_not_parquet(repr(name), error))
        return
    with table:
        shape = _schema_columns(table.schema_arrow)
        for column in columns:
            find_column(column, shape, name)
        chosen = list(dict.fromkeys(column.name for column in columns))
        end = 0
        for group in range(table.num_row_groups):
            number, end = end, end + table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=chosen):
                    yield from _parquet_rows(batch, name, number, bad)
                    number += len(batch)
            except _PARQUET_ERRORS as error:
                bad.add(_not_parquet(f"{name!r}, rows {number + 1:,} to {end:,},", error))


def _parquet_rows(batch: pa.RecordBatch, name: str, before: int, bad: BadRecords) -> Objects:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) > 1:
            for place in range(len(batch)):
                yield from _parquet_rows(batch.slice(place, 1), name, before + place, bad)
            return
        bad.add(ValueError(f"{name}:{before + 1} is not UTF-8"))
        return
    yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, start=before + 1))


def _not_parquet(what: str, error: Exception) -> ValueError:
    if isinstance(error, OSError) and error.errno is not None:
        raise error  # an error of the system; errors about damaged data have no number
    return ValueError(f"{what} does not read as Parquet: {str(error).splitlines()[0]}")


def _schema_columns(schema: pa.Schema) -> dict[str, Any]:
    return {
        field.name: {inner.name: None for inner in field.type} if pa.types.is_struct(field.type) else None
        for field in schema
    }


_TABLE_READERS: dict[str, Callable[[str, Sequence[Column], BadRecords], Objects]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_TABLE_READERS)


def texts_of(rows: Objects, columns: Sequence[Column], bad: BadRecords) -> Rows:
    """Yields the texts that rows hold in some columns; `bad` receives the rows that hold something else."""

    def parse(item: tuple[str, Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
        where, row = item
        return where, tuple(_text(column, row, where) for column in columns)

    return bad.parse_each(rows, parse)


def _text(column: Column, row: Mapping[str, Any], where: str) -> str:
    text = find_column(column, row, where)
    if not isinstance(text, str):
        raise ValueError(f"{where}: column {column.name!r} must hold text, not {_shown(text)}")
    return text


def find_column(column: Column, row: Mapping[str, Any], where: str) -> Any:
    """Returns what a row, or the description of a table, holds for a column.

    Raises:
        ValueError: if the column is missing; the error lists the columns that are there.
    """
    if column.name in row:
        return row[column.name]
    outer, _, inner = column.name.partition(".")
    nested = row.get(outer)
    if isinstance(nested, Mapping) and inner in nested:
        return nested[inner]
    names = listed(chain.from_iterable(_names(*item) for item in row.items()))
    allowed = f"`{column.argument}` can be" if column.argument is not None else "it has"
    raise ValueError(f"{where} has no column {column.name!r}; {allowed} {names}")


def _names(name: str, value: Any) -> Iterable[str]:
    return [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [name]


def outer_columns(columns: Iterable[Column], row: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns of a table that hold some columns, each once."""
    return list(dict.fromkeys(name if name in row else name.partition(".")[0] for name, _ in columns))


def listed(words: Iterable[str]) -> str:
    """Returns words as errors show them: quoted, with commas between them."""
    return ", ".join(map(repr, words))


def _shown(value: object) -> str:
    return f"{type(value).__name__} ({repr(value)[:40]})"
