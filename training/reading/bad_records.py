"""Records that can't be read: stopped at, or left out and counted."""

from __future__ import annotations

import logging
import re

from datasets import Dataset

ACTIONS = ("stop", "skip")

# So many are logged one by one.
SHOWN = 5

# As it stands in the description of a data set in the cache, with the key of what was read. Joining data sets joins
# their descriptions, and each of the parts that one is split into has the whole of it.
_NOTE = re.compile(r"regard: left out (\d+) bad records of ([\w-]+)")

logger = logging.getLogger("regard.training")


class BadRecords:
    """What becomes of the records of a source that can't be read, and how many there were.

    Args:
        action: "stop" at the first, or "skip" each.

    Attributes:
        count: of those skipped.
        stops: whether the first is an error.

    Raises:
        ValueError: if the action is neither.
    """

    def __init__(self, action: str = "stop") -> None:
        if action not in ACTIONS:
            raise ValueError(f"`bad_records` ({action!r}) must be one of {', '.join(map(repr, ACTIONS))}")
        self.stops, self.count = action == "stop", 0
        self._first = ""

    def add(self, error: ValueError) -> None:
        """Takes note of a bad record, whose place the error names.

        Raises:
            ValueError: that error, if it is to be stopped at.
        """
        if self.stops:
            raise error from None
        self.count += 1
        self._first = self._first or str(error)
        if self.count <= SHOWN:
            logger.warning("Left out: %s", error)

    def hint(self) -> str:
        """What an error says of the records skipped, where nothing is left."""
        return f"; {counted(self.count)} left out, the first: {self._first}" if self.count else ""


def note(number: int, key: str) -> str:
    """What the description of a data set says of bad records, with the key of what was read."""
    return f"regard: left out {number} bad records of {key}" if number else ""


def counted(number: int) -> str:
    """A number of bad records in words."""
    return "1 bad record was" if number == 1 else f"{number:,} bad records were"


def skipped_records(*parts: Dataset) -> int:
    """How many bad records were left out when data sets were read, each source counted once.

    Args:
        parts: what `load_documents`, `load_pairs` and `load_captions` gave, or what was joined or split of that.
    """
    notes = (note for part in parts for note in _NOTE.findall(part.info.description or ""))
    return sum({key: int(number) for number, key in notes}.values())
