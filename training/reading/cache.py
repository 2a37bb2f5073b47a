"""Rows and arrays that are written to the cache of `datasets` and memory-mapped from there."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import ArrowBasedBuilder, Dataset, DatasetInfo, Features, SplitGenerator
from datasets.builder import Key
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from datasets.packaged_modules.generator.generator import GeneratorConfig

from .bad_records import BadRecords, counted, note, skipped_records

# Rows are in memory until a batch of them is written, which ends at one of these limits. An array of strings in Arrow
# holds at most 2 GiB.
ROWS_PER_BATCH = 500
CHARACTERS_PER_BATCH = 2**22

logger = logging.getLogger("regard.training")


class _Rows(ArrowBasedBuilder):
    """Writes rows from a generator, like the builder of `Dataset.from_generator`, but in batches of bounded size.

    The description of the data set, which is known only after the last row, is written with the rows.
    """

    BUILDER_CONFIG_CLASS = GeneratorConfig

    def __init__(self, describe: Callable[[], str], **options: Any) -> None:
        super().__init__(**options)
        self._describe = describe

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=self.config.features)

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        return [SplitGenerator(name="train", gen_kwargs={})]

    def _generate_tables(self) -> Iterator[tuple[Key, pa.Table]]:
        features = self.config.features
        for number, batch in enumerate(_batches(self.config.generator())):
            encoded = [features.encode_example(row) for row in batch]
            yield Key(0, number), pa.Table.from_pylist(encoded, schema=features.arrow_schema)
        self.info.description = self._describe()


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(batch) >= ROWS_PER_BATCH or characters >= CHARACTERS_PER_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def mapped(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Returns one memory-mapped array that joins one or more parts in their order.

    Its file has no name, so the disk space is free again once the array is deleted.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    length = 0
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            file.write(np.ascontiguousarray(part).data)
            length += len(part)
        file.flush()
        # An empty file cannot be mapped.
        return np.memmap(file, part.dtype, "r", shape=(length, *part.shape[1:])) if length else part


def write_dataset(
    rows: Callable[[], Iterator[dict[str, Any]]], features: Features, key: Any, bad: BadRecords | None = None
) -> Dataset:
    """Writes rows to the cache of `datasets`, unless it holds rows with the same key, and maps them into memory.

    Args:
        rows: yields the rows. A ValueError or OSError that it raises is not wrapped.
        features: the columns.
        key: everything that the rows depend on.
        bad: counts the records that `rows` leaves out. Their number is stored with the rows and logged whenever the
            rows are loaded.
    """
    counted_by = bad or BadRecords()
    fingerprint = Hasher.hash((key, counted_by.stops))
    builder = _Rows(
        lambda: note(counted_by.count, fingerprint),
        generator=rows,
        features=features,
        config_id=f"default-fingerprint={fingerprint}",
    )
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None
        raise
    dataset = builder.as_dataset(split="train")
    dataset._fingerprint = fingerprint
    if number := skipped_records(dataset):
        logger.warning("%s left out.", counted(number))
    return dataset
