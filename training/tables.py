"""Files, tables and data sets on the Hub: what corpora, parallel texts and captions are read from."""

import csv
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Translation, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

# Rows are held in memory until a batch of them is written.
ROWS_PER_BATCH = 500
MAX_DOCUMENT_BYTES = 2**27

_DATA_SET_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)

_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)

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
    read: Callable[[], Rows]
    rows_per_batch: int = ROWS_PER_BATCH


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


def write_dataset(
    rows: Callable[[], Iterator[dict[str, Any]]], features: Features, key: Any, rows_per_batch: int = ROWS_PER_BATCH
) -> Dataset:
    """Writes rows to the cache of `datasets`, unless rows of the same key are there, and maps them into memory.

    Args:
        rows: gives the rows. Its ValueError or OSError is raised as it is.
        features: the columns.
        key: all that the rows depend on.
        rows_per_batch: how many of them are held in memory.
    """
    try:
        return Dataset.from_generator(
            rows, features=features, fingerprint=Hasher.hash(key), writer_batch_size=rows_per_batch
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


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
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        kind = ConnectionError if isinstance(error, ConnectionError) else ValueError
        reason = " ".join(str(error).split())
        raise kind(f"`{argument}` ({name!r}) is no file or folder here; as a data set on the Hub: {reason}") from None


def hub_texts(name: str, columns: Sequence[Column], split: str, streaming: bool) -> Source:
    """The texts of a data set on the Hub."""
    rows, version = open_hub_data_set(name, split, streaming=streaming)

    def read() -> Rows:
        chosen = rows
        if rows.features is not None:  # else known only after the first row, as the data set does not declare them
            shape = _feature_columns(rows.features)
            for column in columns:
                find_column(column, shape, name)
            chosen = rows.select_columns(list(dict.fromkeys(_outermost(column, shape) for column in columns)))
        return _texts(((f"{name}:{number}", row) for number, row in enumerate(chosen, start=1)), columns)

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
    """What tells that a file has changed."""
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


def open_file(name: str, mode: str, **options: Any) -> Any:
    """Opens a file that may be gzipped."""
    return gzip.open(name, mode, **options) if name.lower().endswith(".gz") else open(name, mode, **options)


def open_text(name: str, newline: str | None = None) -> IO[str]:
    """Opens a text that may be gzipped."""
    file: IO[str] = open_file(name, "rt", encoding="utf-8-sig", newline=newline)
    return file


@contextmanager
def naming_the_file(name: str) -> Iterator[None]:
    """Names the file, and the place in it, in the errors of the decoders of UTF-8 and of gzip."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(_undecodable(name)) from None
    except _GZIP_ERRORS as error:
        raise ValueError(f"{name!r} is not a complete gzip file: {error}") from None


def _undecodable(name: str) -> str:
    # The decoder knows the place within its buffer only. No line of UTF-8 can break inside a character.
    offset = 0
    try:
        with open_file(name, "rb") as file:
            for line in file:
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    place = f"byte {offset + error.start:,} (0x{line[error.start]:02x})"
                    return f"{name!r} is not UTF-8: {place}; if it is text, re-encode it (iconv -t UTF-8)"
                offset += len(line)
    except _GZIP_ERRORS as error:
        # The line may go on beyond what the decoder had.
        return f"{name!r} is not a complete gzip file: {error}"
    return f"{name!r} changed while it was read"


@contextmanager
def naming_the_parquet_file(name: str) -> Iterator[None]:
    """Names the file, in one line, in the errors of the reader of Parquet."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OverflowError, OSError) as error:
        # One of the system's, such as that of a file that is not there, names it itself.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{name!r} does not read as Parquet: {str(error).splitlines()[0]}") from None


# Tables


def read_table(name: str, columns: Sequence[Column]) -> Rows:
    """Reads texts from a file that `is_table`.

    Args:
        name: of the file.
        columns: those that every row must have, each a text.

    Yields:
        The file and line (or row of a Parquet file), from 1; and the texts, in the order of `columns`.

    Raises:
        ValueError: if the file does not parse, a column is missing or holds something other than text.
    """
    with naming_the_file(name):
        yield from _texts(_TABLE_READERS[suffix_of(name)](name, columns), columns)


def _read_json_lines(name: str, columns: Sequence[Column]) -> _Objects:
    with open_text(name) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}:{number} does not parse as JSON (one object a line): {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{name}:{number} must be a JSON object, not {_shown(row)}")
            yield f"{name}:{number}", row


def _read_csv(name: str, columns: Sequence[Column]) -> _Objects:
    # The default, 128 KiB for the whole process, is less than a long article.
    csv.field_size_limit(max(MAX_DOCUMENT_BYTES, csv.field_size_limit()))
    dialect = "excel-tab" if suffix_of(name) == ".tsv" else "excel"
    with open_text(name, newline="") as file:
        reader = csv.DictReader(file, dialect=dialect, strict=True)
        line = 1
        try:
            header = reader.fieldnames or ()
            for column in columns:
                if header.count(column.name) > 1:
                    raise ValueError(
                        f"{name} has {header.count(column.name)} columns {column.name!r}: rename or remove one"
                    )
            line = reader.line_num + 1
            for row in reader:
                if None in row:
                    raise ValueError(f"{name}:{line} has more fields than the header, {listed(header)}")
                yield f"{name}:{line}", row
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{name}:{line} does not parse as CSV ({dialect}): {error}") from None


def _read_parquet(name: str, columns: Sequence[Column]) -> _Objects:
    # Without a buffer, which would grow to the whole column.
    with naming_the_parquet_file(name), pa.parquet.ParquetFile(name, pre_buffer=False) as table:
        shape = _schema_columns(table.schema_arrow)
        for column in columns:
            find_column(column, shape, name)
        chosen = list(dict.fromkeys(column.name for column in columns))
        batches = table.iter_batches(batch_size=ROWS_PER_BATCH, columns=chosen)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))


def _schema_columns(schema: pa.Schema) -> dict[str, Any]:
    return {
        field.name: {inner.name: None for inner in field.type} if pa.types.is_struct(field.type) else None
        for field in schema
    }


_TABLE_READERS: dict[str, Callable[[str, Sequence[Column]], _Objects]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_TABLE_READERS)


def _texts(rows: _Objects, columns: Sequence[Column]) -> Rows:
    for where, row in rows:
        texts = tuple(find_column(column, row, where) for column in columns)
        for column, text in zip(columns, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{where}: column {column.name!r} must hold text, not {_shown(text)}")
        yield where, texts


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
