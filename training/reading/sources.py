"""The sources that users name as data: files, folders, globs and data sets on the Hub."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
from datasets import Dataset, IterableDataset, Translation, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetsError

from .bad_records import BadRecords
from .hub_streaming import stream_rows
from .tables import (
    TABLE_SUFFIXES,
    Column,
    Objects,
    Rows,
    find_column,
    is_table,
    listed,
    outer_columns,
    suffix_of,
    texts_of,
)
from .text_files import num_bytes

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

_DATA_SET_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)

# Raised where a data set is prepared or read: the first two by scripts and by what decodes values.
_DATA_SET_ERRORS = (RuntimeError, ValueError, DatasetsError, pa.ArrowException)


class File(NamedTuple):
    """A file, with its size and time of change, by which a later change is noticed."""

    name: str
    real_path: str
    size: int
    mtime_ns: int


class Source(NamedTuple):
    """One source of rows that the user named.

    Attributes:
        label: how errors call it.
        key: everything that its rows depend on.
        read: reads its rows.
    """

    label: str
    key: Any
    read: Callable[[BadRecords], Rows]


def source_names(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], builtin: str) -> list[str]:
    """Returns the names of the sources in `data`.

    Args:
        data: one source, or several.
        builtin: name of the built-in source, which the error suggests.

    Raises:
        ValueError: if `data` is empty.
    """
    names = [os.fspath(name) for name in ([data] if isinstance(data, (str, os.PathLike)) else data)]
    if not names:
        raise ValueError(f"`data` names no source; give a file, folder, glob, data set id or {builtin!r}")
    return names


def require_limit(rows: str, limit: int | None) -> None:
    """Raises a ValueError if a limit on the number of rows is out of range; `rows` is `pairs` for `max_pairs`."""
    if limit is not None and not 1 <= limit < 2**63:
        raise ValueError(f"`max_{rows}` ({limit}) must be at least 1 and less than 2**63, or None for all {rows}")


# Data sets on the Hub


def is_data_set_id(name: str) -> bool:
    """Returns whether `org/name` or `org/name:config` names a data set on the Hub, and not a local file."""
    is_id = _DATA_SET_ID.fullmatch(name) is not None
    return is_id and not os.path.exists(name) and not is_text(name) and not is_table(name)


def open_hub_data_set(
    name: str, split: str, *, streaming: bool = False, argument: str = "data"
) -> tuple[Dataset | IterableDataset, Any]:
    """Opens a data set on the Hub.

    Args:
        name: `org/name` or `org/name:config`.
        split: the split to open.
        streaming: whether to download only what is read.
        argument: the argument that names the data set, for the error.

    Returns:
        The data set, and a value that changes with its version.

    Raises:
        ValueError: if there is no such data set, configuration or split, or it cannot be prepared.
        ConnectionError: if the Hub cannot be reached.
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


def hub_texts(name: str, columns: Sequence[Column], split: str, streaming: bool) -> Source:
    """Returns columns of texts of a data set on the Hub as a source."""
    rows, version = open_hub_data_set(name, split, streaming=streaming)

    def read(bad: BadRecords) -> Rows:
        return texts_of(hub_rows(rows, columns, name), columns, bad)

    return Source(f"the data set {name!r}", ("hub", version, columns), read)


def hub_rows(rows: Dataset | IterableDataset, columns: Sequence[Column], name: str) -> Objects:
    """Yields the rows of a data set on the Hub, each with its place, for example `org/name:1`.

    Raises:
        ValueError: if a column is missing, or a row cannot be read.
    """
    if rows.features is not None:  # else they are known only after the first row, as the data set declares none
        features = hub_features(rows)
        for column in columns:
            find_column(column, features, name)
        rows = rows.select_columns(outer_columns(columns, features))
    found = stream_rows(rows, name) if isinstance(rows, IterableDataset) else _read_rows(rows, name)
    yield from ((f"{name}:{number}", row) for number, row in enumerate(found, start=1))


def hub_features(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """Returns the features of a data set by column; those of translations by language, as their rows have them."""
    return {
        name: dict.fromkeys(feature.languages) if isinstance(feature, Translation) else feature
        for name, feature in rows.features.items()
    }


def _read_rows(rows: Dataset, name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set on the disk, whose values may still fail to decode."""
    number = 1
    try:
        for row in rows:
            yield row
            number += 1
    except _DATA_SET_ERRORS as error:
        raise ValueError(f"{name}:{number} can't be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Returns the message in one line; an error of `datasets` itself only wraps the one that explains it."""
    cause = error.__cause__ if isinstance(error, DatasetsError) else None
    return " ".join(str(cause or error).split())


# Files


def find_files(
    name: str,
    in_folder: Callable[[str], list[str]],
    seen: set[str],
    builtin: str | None = None,
    argument: str = "data",
) -> list[File]:
    """Finds the files that a name stands for, each once.

    Args:
        name: a file, folder or glob.
        in_folder: returns the paths to read in a folder.
        seen: the real paths of files that are read already and are left out; those that are found are added.
        builtin: name of the built-in source, which the error suggests.
        argument: the argument that gave the name, for the error.

    Raises:
        ValueError: if nothing has that name.
    """
    if os.path.isdir(name):
        paths = in_folder(name)
    elif os.path.exists(name):
        paths = [name]
    elif glob.has_magic(name):
        paths = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not paths:
            raise ValueError(f"`{argument}` ({name!r}) is a glob that matches no file")
    else:
        allowed = f"{builtin!r}, " if builtin is not None else ""
        raise ValueError(
            f"`{argument}` ({name!r}) is not {allowed}a file, a folder, a glob or a data set id (org/name): "
            "there is nothing of that name"
        )
    files = []
    for file in map(file_status, paths):
        if file.real_path not in seen:
            seen.add(file.real_path)
            files.append(file)
    return files


def find_tables(name: str, seen: set[str], builtin: str | None = None, argument: str = "data") -> list[File]:
    """Finds the tables that a name stands for; the arguments are those of `find_files`.

    Raises:
        ValueError: if nothing has that name, or a file is not a table by its name.
    """
    files = find_files(name, _tables_in_folder, seen, builtin, argument)
    for file in files:
        if not is_table(file.name):
            raise ValueError(f"{file.name!r} is not a table: its name must end in {listed(TABLE_SUFFIXES)}")
    return files


def _tables_in_folder(folder: str) -> list[str]:
    paths = list(filter(is_table, list_folder(folder)))
    if not paths:
        raise ValueError(f"folder {folder!r} holds no file that ends in {listed(TABLE_SUFFIXES)}")
    return paths


def file_source(name: str, files: Sequence[File], read: Callable[[str, BadRecords], Rows], options: Any) -> Source:
    """Returns files as one source.

    Args:
        name: what the user named.
        files: the files that it stands for.
        read: reads one file, given its name.
        options: everything else that the rows depend on.
    """

    def read_all(bad: BadRecords) -> Rows:
        return chain.from_iterable(read(file.name, bad) for file in files)

    label = f"{name!r} ({len(files)} {'file' if len(files) == 1 else 'files'})"
    return Source(label, ("files", files, options), read_all)


def list_folder(folder: str) -> list[str]:
    """Returns the paths of all files in a folder and its subfolders that are not hidden, in a fixed order."""
    paths = []
    for parent, subfolders, names in os.walk(folder, onerror=_raise):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths += [os.path.join(parent, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in paths if os.path.isfile(path)]


def _raise(error: OSError) -> NoReturn:
    raise error


def file_status(path: str) -> File:
    """Returns a file with its size and time of change.

    Raises:
        ValueError: if its name is not UTF-8, and so cannot be stored with the rows.
    """
    num_bytes(path, f"the file's name {path!r}")
    status = os.stat(path)
    return File(path, os.path.realpath(path), status.st_size, status.st_mtime_ns)


def is_text(name: str) -> bool:
    """Returns whether a file is a text by its name."""
    return suffix_of(name) in TEXT_SUFFIXES
