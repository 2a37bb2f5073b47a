"""Text corpora: all sources that the user names are read into one `datasets.Dataset` whose rows are documents."""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice

from datasets import Dataset, Features, Value

from ..builtin.python_docs import iter_python_docs, python_files
from .bad_records import BadRecords
from .cache import write_dataset
from .sources import (
    TEXT_SUFFIXES,
    Source,
    file_source,
    file_status,
    find_files,
    hub_texts,
    is_data_set_id,
    is_text,
    list_folder,
    require_limit,
    source_names,
)
from .tables import (
    MAX_DOCUMENT_BYTES,
    TABLE_SUFFIXES,
    Column,
    Rows,
    is_table,
    listed,
    read_table,
    suffix_of,
)
from .text_files import num_bytes, read_lines, read_pieces, require_utf8

DOCUMENT_MODES = ("file", "blank-line", "line")

# Part of every cache key: raise it whenever the same input gives other documents than before.
FORMAT_VERSION = 2


def load_documents(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "python-docs",
    *,
    text_column: str = "text",
    documents: str = "file",
    split: str = "train",
    max_documents: int | None = None,
    streaming: bool = False,
    bad_records: str = "stop",
) -> Dataset:
    """Loads a corpus: a data set with one row for each document and the columns `text` and `source`.

    The documents are written to the cache of `datasets` while they are read, and are memory-mapped from there, so a
    corpus may be larger than the memory. A later call reads the cache, unless an argument that matters, or the size or
    time of change of a file, is different. Documents of nothing but white space are left out.

    Args:
        data: One source, or several to be joined in their order:

            - `python-docs`: the documentation inside this Python's standard library; `python-docs:torch,transformers`
              adds the docstrings of installed packages.
            - A text file (UTF-8, may be gzipped), a folder (the .txt, .text, .md and .rst files anywhere in it, and
              the same with .gz) or a glob such as `notes/**/*.tex`. A file that is found twice is read once.
            - A table: .jsonl (one object a line), .json (the same, or a list of objects), .csv or .tsv (with a header
              line), the same with .gz, or .parquet; also a folder or a glob of them.
            - A data set on the Hub: `org/name` or `org/name:config`.
        text_column: The column of a table or Hub data set that holds the text.
        documents: The unit of a text file that makes one document: the whole `file`, the text between blank lines
            (`blank-line`), or each `line`.
        split: The split of a Hub data set.
        max_documents: The most documents to read. The rest is neither read nor downloaded.
        streaming: Whether to read a Hub data set row by row, which keeps its texts on the disk but not its files;
            `max_documents` does so too. Other sources are always read that way.
        bad_records: What to do with a document or row that cannot be read (it is not UTF-8, does not parse, is too
            large, or lacks the text): "stop" at the first, with an error, or "skip" each, with a warning;
            `skipped_records` counts them. The rest of a damaged file, or of a row group of Parquet, counts as one. A
            missing file, and a column that a whole table lacks, are errors in any case.

    Returns:
        The documents, in an order that is always the same. `source` is a file or data set id, with `:` and the number
        of the line or row (from 1) where there is one; or a topic, module or class of the Python documentation.

    Raises:
        ValueError: An argument or source is not what it may be, a file is not UTF-8 or does not parse, the text column
            is missing or holds something other than text, or there is no text at all.
        OSError: A file cannot be opened, or the Hub cannot be reached.
    """
    if documents not in DOCUMENT_MODES:
        raise ValueError(f"`documents` ({documents!r}) must be one of {listed(DOCUMENT_MODES)}")
    require_limit("documents", max_documents)

    bad = BadRecords(bad_records)
    column = Column(text_column, "text_column")
    sources: list[Source] = []
    seen: set[str] = set()
    for name in source_names(data, "python-docs"):
        if name.partition(":")[0] == "python-docs":
            sources.append(_python_docs(name))
        elif is_data_set_id(name):
            sources.append(hub_texts(name, [column], split, streaming or max_documents is not None))
        else:
            files = find_files(name, _search_folder, seen, "python-docs")
            read = partial(_read_file, column=column, documents=documents)
            sources.append(file_source(name, files, read, (column, documents)))

    def rows() -> Iterator[dict[str, str]]:
        found = bad.parse_each(chain.from_iterable(source.read(bad) for source in sources), _document)
        empty = True
        for document in islice(filter(None, found), max_documents):
            empty = False
            yield document
        if empty:
            labels = ", ".join(source.label for source in sources)
            raise ValueError(f"the corpus is empty: no text in {labels}{bad.hint()}")

    return write_dataset(
        rows,
        features=Features({"text": Value("string"), "source": Value("string")}),
        key=(FORMAT_VERSION, max_documents, [source.key for source in sources]),
        bad=bad,
    )


def _document(row: tuple[str, tuple[str, ...]]) -> dict[str, str] | None:
    """Returns a document as a row; None if it is nothing but white space."""
    where, (text,) = row
    if num_bytes(text, where) > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"{where}: one document of more than {MAX_DOCUMENT_BYTES:,} bytes; "
            "split the file, or set `documents` to 'blank-line' or 'line'"
        )
    return None if text == "" or text.isspace() else {"text": text, "source": where}


def _python_docs(name: str) -> Source:
    packages = [package.strip() for package in name.partition(":")[2].split(",") if package.strip()]
    files = [file_status(str(path)) for _, path in python_files(packages)]
    key = ("python-docs", sys.version, packages, files)

    def read(bad: BadRecords) -> Rows:
        return ((where, (text,)) for text, where in iter_python_docs(packages))

    return Source("the Python documentation", key, read)


def _search_folder(folder: str) -> list[str]:
    paths = list_folder(folder)
    texts = [path for path in paths if is_text(path)]
    tables = [path for path in paths if is_table(path)]
    if texts and tables:
        globs = (os.path.join(folder, "**", "*" + suffix_of(path)) for path in (texts[0], tables[0]))
        raise ValueError(
            f"folder {folder!r} holds both text ({len(texts)} files, such as {texts[0]!r}) and tables ({len(tables)}, "
            f"such as {tables[0]!r}); choose by a glob, such as {' or '.join(map(repr, globs))}"
        )
    if not (texts or tables):
        raise ValueError(
            f"folder {folder!r} holds no file that ends in {listed((*TEXT_SUFFIXES, *TABLE_SUFFIXES))}; "
            "name files of another kind by a glob"
        )
    return texts or tables


def _read_file(name: str, bad: BadRecords, column: Column, documents: str) -> Rows:
    if is_table(name):
        return read_table(name, [column], bad)

    def parse(document: tuple[str, str]) -> tuple[str, tuple[str, ...]]:
        where, text = document
        require_utf8(text, where, name, bad)
        return where, (text,)

    return bad.parse_each(_text_documents(name, documents, bad), parse)


def _text_documents(name: str, documents: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    # One character more than allowed shows that a document is too large.
    if documents == "file":
        for _, text in islice(read_pieces(name, bad, lambda file: file.read(MAX_DOCUMENT_BYTES + 1)), 1):
            yield name, text
        return
    lines = read_lines(name, bad, MAX_DOCUMENT_BYTES)
    for is_blank, block in groupby(lines, key=lambda line: line[1].isspace()):
        if is_blank:
            continue
        if documents == "line":
            yield from ((f"{name}:{number}", line.rstrip("\n")) for number, line in block)
        else:
            yield _joined(name, block)


def _joined(name: str, lines: Iterator[tuple[int, str]]) -> tuple[str, str]:
    first, line = next(lines)
    parts, size = [line], len(line)
    for _, line in lines:
        if size <= MAX_DOCUMENT_BYTES:
            parts.append(line)
            size += len(line)
    return f"{name}:{first}", "".join(parts)
