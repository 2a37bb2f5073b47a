"""Records that cannot be read: the first stops the reading, or all are left out and counted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from datasets import Dataset

ACTIONS = ("stop", "skip")

# The number of bad records that are logged one by one.
SHOWN = 5

# A line in the description of a cached data set, with the key of the data set. Joined data sets have the descriptions
# of all parts, and each part of a split one has the whole description: by the key each counts once.
_NOTE = re.compile(r"regard: left out (\d+) bad records of ([\w-]+)")

Record = TypeVar("Record")
Parsed = TypeVar("Parsed")

logger = logging.getLogger("regard.training")


class BadRecords:
    """Receives the records that cannot be read: raises the error of the first, or counts all of them.

    Args:
        action: "stop" at the first, or "skip" each.

    Attributes:
        count: the number of records skipped.
        stops: whether the first record is an error.

    Raises:
        ValueError: if the action is neither "stop" nor "skip".
    """

    def __init__(self, action: str = "stop") -> None:
        if action not in ACTIONS:
            raise ValueError(f"`bad_records` ({action!r}) must be one of {', '.join(map(repr, ACTIONS))}")
        self.stops, self.count = action == "stop", 0
        self._first = ""

    def add(self, error: ValueError) -> None:
        """Adds a bad record, given by an error that names its place.

        Raises:
            ValueError: this error, if the first bad record stops the reading.
        """
        if self.stops:
            raise error from None
        self.count += 1
        self._first = self._first or str(error)
        if self.count <= SHOWN:
            logger.warning("Left out: %s", error)

    def parse_each(self, records: Iterable[Record], parse: Callable[[Record], Parsed]) -> Iterator[Parsed]:
        """Yields what a function makes of each record; those for which it raises a ValueError are bad records."""
        for record in records:
            try:
                parsed = parse(record)
            except ValueError as error:
                self.add(error)
            else:
                yield parsed

    def hint(self) -> str:
        """Returns the end of the error for data of which nothing is left: how many records were skipped."""
        return f"; {counted(self.count)} left out, the first: {self._first}" if self.count else ""


def note(number: int, key: str) -> str:
    """Returns the line in the description of a data set that records the number of its bad records."""
    return f"regard: left out {number} bad records of {key}" if number else ""


def counted(number: int) -> str:
    """Returns the start of a sentence about a number of bad records."""
    return "1 bad record was" if number == 1 else f"{number:,} bad records were"


def skipped_records(*parts: Dataset) -> int:
    """Returns how many bad records were left out of data sets; each source counts once.

    Args:
        parts: data sets from `load_documents`, `load_pairs` or `load_captions`, or joined or split ones of these.
    """
    notes = (note for part in parts for note in _NOTE.findall(part.info.description or ""))
    return sum({key: int(number) for number, key in notes}.values())
