"""Files, tables and data sets on the Hub: what corpora, parallel texts and captions are read from."""

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, IterableDataset, Translation, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetsError

from .bad_records import BadRecords
from .hub_streaming import stream_rows
from .text_files import read_lines, require_utf8

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

MAX_DOCUMENT_BYTES = 2**27
# In characters. A line of JSON may write each character of a document as six.
MAX_LINE = 4 * MAX_DOCUMENT_BYTES

_PARQUET_ROWS = 500

_DATA_SET_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)

# Of a data set that is prepared or read; the first two are those of scripts, and of what decodes values.
_DATA_SET_ERRORS = (RuntimeError, ValueError, DatasetsError, pa.ArrowException)
_PARQUET_ERRORS = (pa.ArrowException, OverflowError, OSError)

Rows: TypeAlias = Iterator[tuple[str, tuple[str, ...]]]  # where the row is, its texts
_Objects: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]  # where the row is, all of it


class Column(NamedTuple):
    """A column that must be there, and the argument that names it, if it is not always the same."""

    name: str
    argument: str | None = None


class File(NamedTuple):
    """A file, and what tells that it has changed."""

    name: str
    real_path: str
    size: int
    mtime_ns: int


class Source(NamedTuple):
    """One thing that the user named: what errors call it, what its rows depend on, and how to read them."""

    label: str
    key: Any
    read: Callable[[BadRecords], Rows]


def source_names(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], builtin: str) -> list[str]:
    """The sources that `data` names.

    Args:
        data: one or several.
        builtin: the source that needs no data of the user's, for the error.

    Raises:
        ValueError: if there is none.
    """
    names = [os.fspath(name) for name in ([data] if isinstance(data, (str, os.PathLike)) else data)]
    if not names:
        raise ValueError(f"`data` names no source; give a file, folder, glob, data set id or {builtin!r}")
    return names


def num_bytes(text: str, where: str) -> int:
    """The size of a text in UTF-8, which it must have."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is half a surrogate pair, which is no text") from None


def require_content(text: str, column: str, where: str) -> None:
    """Refuses a text that cannot be stored or holds nothing to read."""
    num_bytes(text, where)
    if not text.strip():
        raise ValueError(f"{where}: column {column!r} must hold text, not nothing or white space alone")


def require_most(rows: str, most: int | None) -> None:
    """Refuses a number that there can't be of rows at most: `max_pairs` of pairs."""
    if most is not None and not 1 <= most < 2**63:
        raise ValueError(f"`max_{rows}` ({most}) must be at least 1 and less than 2**63, or None for all {rows}")


# Data sets on the Hub


def is_data_set_id(name: str) -> bool:
    """Whether a name is that of a data set on the Hub: `org/name` or `org/name:config`, and nothing that lies here."""
    is_id = _DATA_SET_ID.fullmatch(name) is not None
    return is_id and not os.path.exists(name) and not is_text(name) and not is_table(name)


def open_hub_data_set(
    name: str, split: str, *, streaming: bool = False, argument: str = "data"
) -> tuple[Dataset | IterableDataset, Any]:
    """Opens a data set on the Hub.

    Args:
        name: `org/name` or `org/name:config`.
        split: which of its splits.
        streaming: downloads what is read alone.
        argument: what named it, for the error.

    Returns:
        The data set, and what tells its version.
    """
    match = _DATA_SET_ID.fullmatch(name)
    assert match is not None
    path, config = match.groups()
    try:
        if streaming:
            builder = load_dataset_builder(path, config)
            return builder.as_streaming_dataset(split=split), (path, builder.config_id, builder.hash, split)
        rows = load_dataset(path, config, split=split)
        return rows, (path, rows._fingerprint, split)
    except (ConnectionError, FileNotFoundError, *_DATA_SET_ERRORS) as error:
        kind = ConnectionError if isinstance(error, ConnectionError) else ValueError
        reason = _reason(error)
        raise kind(f"`{argument}` ({name!r}) is no file or folder here; as a data set on the Hub: {reason}") from None


def _read_rows(rows: Dataset, name: str) -> Iterator[dict[str, Any]]:
    """Gives the rows of a data set that lies on the disk, whose values may still fail to decode."""
    number = 1
    try:
        for row in rows:
            yield row
            number += 1
    except _DATA_SET_ERRORS as error:
        raise ValueError(f"{name}:{number} can't be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What went wrong, in one line; `datasets` itself says no more than that something did."""
    cause = error.__cause__ if isinstance(error, DatasetsError) else None
    return " ".join(str(cause or error).split())


def hub_texts(name: str, columns: Sequence[Column], split: str, streaming: bool) -> Source:
    """The texts of a data set on the Hub."""
    rows, version = open_hub_data_set(name, split, streaming=streaming)

    def read(bad: BadRecords) -> Rows:
        chosen = rows
        if rows.features is not None:  # else known only after the first row, as the data set does not declare them
            shape = _feature_columns(rows.features)
            for column in columns:
                find_column(column, shape, name)
            chosen = rows.select_columns(list(dict.fromkeys(_outermost(column, shape) for column in columns)))
        found = stream_rows(chosen, name) if isinstance(chosen, IterableDataset) else _read_rows(chosen, name)
        return _texts(((f"{name}:{number}", row) for number, row in enumerate(found, start=1)), columns, bad)

    return Source(f"the data set {name!r}", ("hub", version, columns), read)


def _feature_columns(features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dict.fromkeys(feature.languages) if isinstance(feature, Translation) else feature
        for name, feature in features.items()
    }


# Files


def find_files(name: str, in_folder: Callable[[str], list[str]], builtin: str) -> list[File]:
    """The files that a name stands for, each once.

    Args:
        name: a file, folder or glob.
        in_folder: gives the paths to read in a folder.
        builtin: the source that needs no file, for the error.

    Raises:
        ValueError: if there is nothing of that name.
    """
    if os.path.isdir(name):
        paths = in_folder(name)
    elif os.path.exists(name):
        paths = [name]
    elif glob.has_magic(name):
        paths = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not paths:
            raise ValueError(f"`data` ({name!r}) is a glob that matches no file")
    else:
        raise ValueError(
            f"`data` ({name!r}) is not {builtin!r}, a file, a folder, a glob or a data set id (org/name): "
            "there is nothing of that name"
        )
    files: dict[str, File] = {}
    for file in map(file_status, paths):
        files.setdefault(file.real_path, file)
    return list(files.values())


def files_label(name: str, files: Sequence[File]) -> str:
    """What errors call the files that a name stands for."""
    return f"{name!r} ({len(files)} {'file' if len(files) == 1 else 'files'})"


def list_folder(folder: str) -> list[str]:
    """The paths of the files anywhere in a folder that are not hidden, in an order that is always the same."""
    paths = []
    for parent, subfolders, names in os.walk(folder, onerror=_raise):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths += [os.path.join(parent, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in paths if os.path.isfile(path)]


def _raise(error: OSError) -> NoReturn:
    raise error


def file_status(path: str) -> File:
    """What tells that a file has changed.

    Raises:
        ValueError: if its name is not UTF-8, and can't be stored with what is read.
    """
    num_bytes(path, f"the file's name {path!r}")
    status = os.stat(path)
    return File(path, os.path.realpath(path), status.st_size, status.st_mtime_ns)


def suffix_of(name: str) -> str:
    """The suffix that tells a file's kind, in small letters and without `.gz`."""
    return Path(name.lower().removesuffix(".gz")).suffix


def is_text(name: str) -> bool:
    """Whether a file is a text by its name."""
    return suffix_of(name) in TEXT_SUFFIXES


def is_table(name: str) -> bool:
    """Whether a file is a table by its name."""
    return suffix_of(name) in _TABLE_READERS


@contextmanager
def naming_the_parquet_file(name: str) -> Iterator[None]:
    """Names the file, in one line, in the errors of the reader of Parquet."""
    try:
        yield
    except (*_PARQUET_ERRORS, UnicodeDecodeError) as error:
        raise _not_parquet(repr(name), error) from None


# Tables


def read_table(name: str, columns: Sequence[Column], bad: BadRecords | None = None) -> Rows:
    """Reads texts from a file that `is_table`.

    Args:
        name: of the file.
        columns: those that every row must have, each a text.
        bad: takes note of the rows that can't be read, and of what follows where a file can't be read on; None stops
            at the first. A column that a header or schema lacks is an error in any case.

    Yields:
        The file and line (or row of a Parquet file), from 1; and the texts, in the order of `columns`.

    Raises:
        ValueError: if the file does not parse, a column is missing or holds something other than text.
    """
    bad = bad or BadRecords()
    return _texts(_TABLE_READERS[suffix_of(name)](name, columns, bad), columns, bad)


def _read_json_lines(name: str, columns: Sequence[Column], bad: BadRecords) -> _Objects:
    for number, line in read_lines(name, bad, MAX_LINE):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        try:
            require_utf8(line, where, name, bad)
            row = _parse_json(line, where)
        except ValueError as error:
            bad.add(error)
        else:
            yield where, row


def _parse_json(line: str, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise ValueError(f"{where}: a line of more than {MAX_LINE:,} characters")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} does not parse as JSON (one object a line): {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a JSON object, not {_shown(row)}")
    return row


def _read_csv(name: str, columns: Sequence[Column], bad: BadRecords) -> _Objects:
    # The default, 128 KiB for the whole process, is less than a long article.
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


def _read_parquet(name: str, columns: Sequence[Column], bad: BadRecords) -> _Objects:
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


def _parquet_rows(batch: pa.RecordBatch, name: str, before: int, bad: BadRecords) -> _Objects:
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
        raise error  # the system's; of damaged data it has no number
    return ValueError(f"{what} does not read as Parquet: {str(error).splitlines()[0]}")


def _schema_columns(schema: pa.Schema) -> dict[str, Any]:
    return {
        field.name: {inner.name: None for inner in field.type} if pa.types.is_struct(field.type) else None
        for field in schema
    }


_TABLE_READERS: dict[str, Callable[[str, Sequence[Column], BadRecords], _Objects]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_TABLE_READERS)


def _texts(rows: _Objects, columns: Sequence[Column], bad: BadRecords) -> Rows:
    for where, row in rows:
        try:
            texts = tuple(_text(column, row, where) for column in columns)
        except ValueError as error:
            bad.add(error)
        else:
            yield where, texts


def _text(column: Column, row: Mapping[str, Any], where: str) -> str:
    text = find_column(column, row, where)
    if not isinstance(text, str):
        raise ValueError(f"{where}: column {column.name!r} must hold text, not {_shown(text)}")
    return text


def find_column(column: Column, row: Mapping[str, Any], where: str) -> Any:
    """What a row, or a table's description, holds for a column; the one inside another is named `outer.inner`.

    Raises:
        ValueError: if it is not there.
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


def _outermost(column: Column, row: Mapping[str, Any]) -> str:
    return column.name if column.name in row else column.name.partition(".")[0]


def listed(words: Iterable[str]) -> str:
    """Words as an error shows them."""
    return ", ".join(map(repr, words))


def _shown(value: object) -> str:
    return f"{type(value).__name__} ({repr(value)[:40]})"
