"""Pairs of texts: all sources that the user names are read into one `datasets.Dataset` of source and target texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from datasets import Dataset, Features, Value

from .bad_records import BadRecords
from .cache import write_dataset
from .sources import (
    Source,
    file_source,
    find_tables,
    hub_texts,
    is_data_set_id,
    require_limit,
    source_names,
)
from .tables import Column, read_table
from .text_files import require_content

# Part of every cache key: raise it whenever the same input gives other pairs than before.
FORMAT_VERSION = 2


def load_pairs(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    source_column: str = "source",
    target_column: str = "target",
    split: str = "train",
    max_pairs: int | None = None,
    streaming: bool = False,
    bad_records: str = "stop",
) -> Dataset:
    """Loads pairs of texts: a data set with one row for each pair and the columns `source` and `target`.

    The pairs are written to the cache of `datasets` while they are read, and are memory-mapped from there. A later
    call reads the cache, unless an argument that matters, or the size or time of change of a file, is different.

    Args:
        data: One source, or several to be joined in their order:

            - A table: .jsonl (one object a line), .json (the same, or a list of objects), .csv or .tsv (with a header
              line), the same with .gz, or .parquet; also a folder (the tables anywhere in it) or a glob of them. A
              file that is found twice is read once.
            - A data set on the Hub: `org/name` or `org/name:config`.
        source_column: The column that holds the source texts. `translation.en` is the column `en` inside of
            `translation`.
        target_column: The column that holds the target texts, likewise.
        split: The split of a Hub data set.
        max_pairs: The most pairs to read. The rest is neither read nor downloaded.
        streaming: Whether to read a Hub data set row by row, which keeps its texts on the disk but not its files;
            `max_pairs` does so too. Other sources are always read that way.
        bad_records: What to do with a row that cannot be read or lacks a text: "stop" or "skip", as for
            `load_documents`.

    Returns:
        The pairs, in an order that is always the same.

    Raises:
        ValueError: An argument or source is not what it may be, a file does not parse, a column is missing or holds
            something other than text, a text is empty or nothing but white space, or there are no pairs at all.
        OSError: A file cannot be opened, or the Hub cannot be reached.
    """
    require_limit("pairs", max_pairs)
    bad = BadRecords(bad_records)
    columns = [Column(source_column, "source_column"), Column(target_column, "target_column")]
    sources: list[Source] = []
    seen: set[str] = set()
    for name in source_names(data, "dates"):
        if is_data_set_id(name):
            sources.append(hub_texts(name, columns, split, streaming or max_pairs is not None))
        else:
            files = find_tables(name, seen, "dates")
            sources.append(file_source(name, files, lambda file, bad: read_table(file, columns, bad), columns))

    def pair(row: tuple[str, tuple[str, ...]]) -> dict[str, str]:
        where, texts = row
        for column, text in zip(columns, texts, strict=True):
            require_content(text, column.name, where)
        return dict(zip(("source", "target"), texts, strict=True))

    def rows() -> Iterator[dict[str, str]]:
        found = bad.parse_each(chain.from_iterable(source.read(bad) for source in sources), pair)
        empty = True
        for row in islice(found, max_pairs):
            empty = False
            yield row
        if empty:
            labels = ", ".join(source.label for source in sources)
            raise ValueError(f"there is no pair in {labels}{bad.hint()}")

    return write_dataset(
        rows,
        features=Features({"source": Value("string"), "target": Value("string")}),
        key=("pairs", FORMAT_VERSION, max_pairs, [source.key for source in sources]),
        bad=bad,
    )
