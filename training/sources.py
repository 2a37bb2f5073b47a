"""Corpora: whatever the user names is read into one `datasets.Dataset` whose rows are documents."""

import csv
import glob
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, Features, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from .python_docs import iter_python_docs, python_files

DOCUMENT_MODES = ("file", "blank-line", "line")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

# Part of every cache key: to be raised whenever the same input gives other documents than before.
FORMAT_VERSION = 1

# Rows are held in memory until a batch of them is written. A whole file may be a book or much more, and Arrow's arrays
# of strings end at 2 GiB.
FILES_PER_BATCH = 16
ROWS_PER_BATCH = 500
MAX_DOCUMENT_BYTES = 2**31 // FILES_PER_BATCH

_DATA_SET_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)

Document: TypeAlias = tuple[str, str]  # text, source
Rows: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]  # where the row is, the row


class _File(NamedTuple):
    """A file, and what tells that it has changed."""

    name: str
    real_path: str
    size: int
    mtime_ns: int


class _Source(NamedTuple):
    """One thing that the user named: what errors call it, what its documents depend on, and how to read them."""

    label: str
    key: Any
    read: Callable[[], Iterator[Document]]
    rows_per_batch: int = ROWS_PER_BATCH


def load_documents(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "python-docs",
    *,
    text_column: str = "text",
    documents: str = "file",
    split: str = "train",
    max_documents: int | None = None,
    streaming: bool = False,
) -> Dataset:
    """Loads a corpus: a data set with one row for each document and the columns `text` and `source`.

    The documents are written to the cache of `datasets` as they are read and are memory-mapped from there, so a corpus
    may be larger than the memory. A later call reads the cache, unless a file's size or time of change, or an argument
    that matters, is another. Documents of nothing but white space are left out.

    Args:
        data: One source, or several to be joined in their order:

            - `python-docs`: the documentation inside this Python's standard library; `python-docs:torch,transformers`
              adds the docstrings of installed packages.
            - A text file (UTF-8, may be gzipped), a folder (the .txt, .text, .md and .rst files anywhere in it, and
              the same with .gz) or a glob such as `notes/**/*.tex`. A file that is found twice is read once.
            - A table: .jsonl or .json (one object a line), .csv or .tsv (with a header line), the same with .gz, or
              .parquet; also a folder or a glob of them.
            - A data set on the Hub: `org/name` or `org/name:config`.
        text_column: The column of a table or Hub data set that holds the text.
        documents: What is one document in a text file: the whole `file`, the text between blank lines (`blank-line`),
            or each `line`.
        split: The split of a Hub data set.
        max_documents: How many documents to read. The rest is neither read nor downloaded.
        streaming: Reads a Hub data set row by row, so that its texts are kept on the disk but its files are not, as
            `max_documents` does too. It changes nothing for other sources, which are always read that way.

    Returns:
        The documents, in an order that is always the same. `source` is a file or data set id, with `:` and the number
        of the line or row (from 1) where there is one; or a topic, module or class of the Python documentation.

    Raises:
        ValueError: An argument or source is not what it may be, a file is not UTF-8 or does not parse, the text column
            is missing or holds something other than text, or there is no text at all.
        OSError: A file cannot be opened, or the Hub cannot be reached.
    """
    if documents not in DOCUMENT_MODES:
        raise ValueError(f"`documents` ({documents!r}) must be one of {_listed(DOCUMENT_MODES)}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"`max_documents` ({max_documents}) must be at least 1, or None for all documents")
    names = [os.fspath(name) for name in ([data] if isinstance(data, (str, os.PathLike)) else data)]
    if not names:
        raise ValueError("`data` names no source; give a file, folder, glob, data set id or 'python-docs'")

    sources: list[_Source] = []
    seen: set[str] = set()
    for name in names:
        if name.partition(":")[0] == "python-docs":
            sources.append(_python_docs(name))
        elif _DATA_SET_ID.fullmatch(name) and not os.path.exists(name) and not _is_text(name) and not _is_table(name):
            sources.append(_hub_data_set(name, text_column, split, streaming or max_documents is not None))
        else:
            files = [file for file in _find_files(name) if file.real_path not in seen]
            seen.update(file.real_path for file in files)
            sources.append(_files(name, files, text_column, documents))

    def rows() -> Iterator[dict[str, str]]:
        found = filter(_has_text, chain.from_iterable(source.read() for source in sources))
        empty = True
        for text, name in islice(found, max_documents):
            empty = False
            yield {"text": text, "source": name}
        if empty:
            raise ValueError(f"the corpus is empty: no text in {', '.join(source.label for source in sources)}")

    try:
        return Dataset.from_generator(
            rows,
            features=Features({"text": Value("string"), "source": Value("string")}),
            fingerprint=Hasher.hash((FORMAT_VERSION, max_documents, [source.key for source in sources])),
            writer_batch_size=min(source.rows_per_batch for source in sources),
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise


def _has_text(document: Document) -> bool:
    text, name = document
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is half a surrogate pair, which is no text") from None
    if size > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"{name}: one document of more than {MAX_DOCUMENT_BYTES:,} bytes; "
            "split the file, or set `documents` to 'blank-line' or 'line'"
        )
    return not (text == "" or text.isspace())


# The Python documentation


def _python_docs(name: str) -> _Source:
    packages = [package.strip() for package in name.partition(":")[2].split(",") if package.strip()]
    files = [_stat(str(path)) for _, path in python_files(packages)]
    key = ("python-docs", sys.version, packages, files)
    return _Source("the Python documentation", key, lambda: iter_python_docs(packages))


# Data sets on the Hub


def _hub_data_set(name: str, text_column: str, split: str, streaming: bool) -> _Source:
    match = _DATA_SET_ID.fullmatch(name)
    assert match is not None
    path, config = match.groups()
    try:
        if streaming:
            builder = load_dataset_builder(path, config)
            rows = builder.as_streaming_dataset(split=split)
            version = (builder.config_id, builder.hash)
        else:
            rows = load_dataset(path, config, split=split)
            version = rows._fingerprint
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        kind = ConnectionError if isinstance(error, ConnectionError) else ValueError
        reason = " ".join(str(error).split())
        raise kind(f"`data` ({name!r}) is no file or folder here; as a data set on the Hub: {reason}") from None

    def read() -> Iterator[Document]:
        columns = rows.column_names
        if columns is not None:  # known only after the first row where the data set does not declare its features
            _require_column(text_column, columns, name)
        texts = rows if columns is None else rows.select_columns(text_column)
        return _texts(((f"{name}:{number}", row) for number, row in enumerate(texts, start=1)), text_column)

    return _Source(f"the data set {name!r}", ("hub", path, version, split, text_column), read)


# Files


def _files(name: str, files: Sequence[_File], text_column: str, documents: str) -> _Source:
    def read() -> Iterator[Document]:
        return chain.from_iterable(_read_file(file.name, text_column, documents) for file in files)

    whole_files = documents == "file" and not all(_is_table(file.name) for file in files)
    return _Source(
        label=f"{name!r} ({len(files)} {'file' if len(files) == 1 else 'files'})",
        key=("files", files, text_column, documents),
        read=read,
        rows_per_batch=FILES_PER_BATCH if whole_files else ROWS_PER_BATCH,
    )


def _find_files(name: str) -> list[_File]:
    if os.path.isdir(name):
        paths = _search_folder(name)
    elif os.path.exists(name):
        paths = [name]
    elif glob.has_magic(name):
        paths = sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not paths:
            raise ValueError(f"`data` ({name!r}) is a glob that matches no file")
    else:
        raise ValueError(
            f"`data` ({name!r}) is not 'python-docs', a file, a folder, a glob or a data set id (org/name): "
            "there is nothing of that name"
        )
    files: dict[str, _File] = {}
    for file in map(_stat, paths):
        files.setdefault(file.real_path, file)
    return list(files.values())


def _search_folder(folder: str) -> list[str]:
    paths = []
    for parent, subfolders, names in os.walk(folder, onerror=_raise):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths += [os.path.join(parent, name) for name in sorted(names) if not name.startswith(".")]
    texts = [path for path in paths if _is_text(path) and os.path.isfile(path)]
    tables = [path for path in paths if _is_table(path) and os.path.isfile(path)]
    if texts and tables:
        globs = (os.path.join(folder, "**", "*" + _suffix(path)) for path in (texts[0], tables[0]))
        raise ValueError(
            f"folder {folder!r} holds both text ({len(texts)} files, such as {texts[0]!r}) and tables ({len(tables)}, "
            f"such as {tables[0]!r}); choose by a glob, such as {' or '.join(map(repr, globs))}"
        )
    if not (texts or tables):
        raise ValueError(
            f"folder {folder!r} holds no file that ends in {_listed((*TEXT_SUFFIXES, *_TABLE_READERS))}; "
            "name files of another kind by a glob"
        )
    return texts or tables


def _raise(error: OSError) -> NoReturn:
    raise error


def _stat(path: str) -> _File:
    status = os.stat(path)
    return _File(path, os.path.realpath(path), status.st_size, status.st_mtime_ns)


def _suffix(name: str) -> str:
    return Path(name.lower().removesuffix(".gz")).suffix


def _is_text(name: str) -> bool:
    return _suffix(name) in TEXT_SUFFIXES


def _is_table(name: str) -> bool:
    return _suffix(name) in _TABLE_READERS


def _read_file(name: str, text_column: str, documents: str) -> Iterator[Document]:
    try:
        if _is_table(name):
            yield from _texts(_TABLE_READERS[_suffix(name)](name, text_column), text_column)
        else:
            yield from _read_text(name, documents)
    except UnicodeDecodeError:
        raise ValueError(_undecodable(name)) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name!r} is not a complete gzip file: {error}") from None


def _open(name: str, mode: str, **options: Any) -> Any:
    return gzip.open(name, mode, **options) if name.lower().endswith(".gz") else open(name, mode, **options)


def _open_text(name: str, newline: str | None = None) -> IO[str]:
    file: IO[str] = _open(name, "rt", encoding="utf-8-sig", newline=newline)
    return file


def _undecodable(name: str) -> str:
    # The decoder knows the place within its buffer only. No line of UTF-8 can break inside a character.
    offset = 0
    with _open(name, "rb") as file:
        for line in file:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f"byte {offset + error.start:,} (0x{line[error.start]:02x})"
                return f"{name!r} is not UTF-8: {place}; if it is text, re-encode it (iconv -t UTF-8)"
            offset += len(line)
    return f"{name!r} changed while it was read"


def _read_text(name: str, documents: str) -> Iterator[Document]:
    with _open_text(name) as file:
        if documents == "file":
            yield file.read(MAX_DOCUMENT_BYTES + 1), name
            return
        lines = enumerate(file, start=1)
        for is_blank, block in groupby(lines, key=lambda line: line[1].isspace()):
            if is_blank:
                continue
            if documents == "line":
                yield from ((line.rstrip("\n"), f"{name}:{number}") for number, line in block)
            else:
                first, line = next(block)
                yield line + "".join(line for _, line in block), f"{name}:{first}"


def _read_json_lines(name: str, text_column: str) -> Rows:
    with _open_text(name) as file:
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


def _read_csv(name: str, text_column: str) -> Rows:
    # The default, 128 KiB for the whole process, is less than a long article.
    csv.field_size_limit(max(MAX_DOCUMENT_BYTES, csv.field_size_limit()))
    dialect = "excel-tab" if _suffix(name) == ".tsv" else "excel"
    with _open_text(name, newline="") as file:
        reader = csv.DictReader(file, dialect=dialect, strict=True)
        line = 1
        try:
            columns = reader.fieldnames or ()
            line = reader.line_num + 1
            for row in reader:
                if None in row:
                    raise ValueError(f"{name}:{line} has more fields than the header, {_listed(columns)}")
                yield f"{name}:{line}", row
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{name}:{line} does not parse as CSV ({dialect}): {error}") from None


def _read_parquet(name: str, text_column: str) -> Rows:
    try:
        with pa.parquet.ParquetFile(name, pre_buffer=False) as table:  # a buffer that would grow to the whole column
            _require_column(text_column, table.schema_arrow.names, name)
            batches = table.iter_batches(batch_size=ROWS_PER_BATCH, columns=[text_column])
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{name}:{number}", row) for number, row in enumerate(rows, start=1))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} does not read as Parquet: {str(error).splitlines()[0]}") from None


_TABLE_READERS: dict[str, Callable[[str, str], Rows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _texts(rows: Rows, text_column: str) -> Iterator[Document]:
    for where, row in rows:
        _require_column(text_column, row, where)
        text = row[text_column]
        if not isinstance(text, str):
            raise ValueError(f"{where}: column {text_column!r} must hold text, not {_shown(text)}")
        yield text, where


def _require_column(column: str, columns: Iterable[str], where: str) -> None:
    if column not in columns:
        raise ValueError(f"{where} has no column {column!r}; `text_column` can be {_listed(columns)}")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def _shown(value: object) -> str:
    return f"{type(value).__name__} ({repr(value)[:40]})"
