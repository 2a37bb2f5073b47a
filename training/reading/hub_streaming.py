"""Streaming the rows of a data set from the Hub, which goes on at the same row after the connection breaks."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from huggingface_hub.utils import httpx

# In seconds, before each further try. The libraries below have tried for a while already: huggingface_hub requests a
# part of a file six times, and `datasets` goes on up to twenty times after the connection is lost. They give up on a
# Hub that answers with errors, for example while it is restarted.
WAITS = (5.0, 10.0, 20.0, 40.0, 80.0)

_BROKEN = (ConnectionError, EOFError, TimeoutError, asyncio.TimeoutError, httpx.RequestError)

logger = logging.getLogger("regard.training")


def stream_rows(rows: IterableDataset, name: str) -> Iterator[dict[str, Any]]:
    """Yields each row once, and tries again if the connection breaks.

    The number of tries is counted anew after each row, so a long stream may be interrupted often. After an
    interruption the current file, and at most the one before it, are read again from the beginning.

    Args:
        rows: a streamed data set.
        name: name of the data set, for errors.

    Raises:
        ConnectionError: if the last try failed, or further tries would not help; the error names the row.
        ValueError: if the data set itself cannot be read on.
    """
    number, tries = 1, 0
    while True:
        try:
            for row in rows:
                yield row
                number, tries = number + 1, 0
            return
        except Exception as error:  # the libraries below raise errors of many kinds
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if not _is_connection(error):
                raise ValueError(f"{name}:{number} can't be read: {reason}") from None
            if tries == len(WAITS) or not _may_pass(error):
                times = f", {tries + 1} times in a row" if tries else ""
                raise ConnectionError(f"{name}:{number} can't be reached{times}: {reason}") from None
            logger.warning("%s:%d can't be reached, trying again in %g s: %s", name, number, WAITS[tries], reason)
            time.sleep(WAITS[tries])
            tries += 1
            # The state after the last row: a number of whole files, and a number of rows of the next.
            rows.load_state_dict(rows.state_dict())


def _status(error: Exception) -> int | None:
    """Returns the HTTP status in an error of any client; None if it has none."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _is_connection(error: Exception) -> bool:
    # aiohttp takes long to import; if it is not imported, it cannot have raised the error.
    client = sys.modules.get("aiohttp")
    return (
        isinstance(error, _BROKEN)
        or _status(error) is not None
        or (client is not None and isinstance(error, client.ClientError))
    )


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)
    # `datasets` raises this class itself once its own tries are over; the system raises subclasses.
    return type(error) is not ConnectionError
