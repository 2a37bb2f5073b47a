"""Rows of a data set that is streamed from the Hub: when the connection breaks, they go on where they were."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from huggingface_hub.utils import httpx

# In seconds, before each further try. What lies below has tried for a while already: huggingface_hub asks for a part
# of a file six times, and `datasets` reads on up to twenty times where the connection itself is lost. They give up on
# a Hub that answers with errors, as one does that is being restarted.
WAITS = (5.0, 10.0, 20.0, 40.0, 80.0)

_BROKEN = (ConnectionError, EOFError, TimeoutError, asyncio.TimeoutError, httpx.RequestError)

logger = logging.getLogger("regard.training")


def stream_rows(rows: IterableDataset, name: str) -> Iterator[dict[str, Any]]:
    """Gives each row once.

    The tries are counted anew after each row, so that a long reading may be interrupted often. The file that it had
    come to, and at most the one before, are read again from the beginning.

    Args:
        rows: a streamed data set.
        name: what errors call it.

    Raises:
        ConnectionError: if the last try failed, or further ones would not help, with the row that it failed at.
        ValueError: if the data set itself can't be read on.
    """
    number, tries = 1, 0
    while True:
        try:
            for row in rows:
                yield row
                number, tries = number + 1, 0
            return
        except Exception as error:  # the readers below let errors of many kinds through
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if not _is_connection(error):
                raise ValueError(f"{name}:{number} can't be read: {reason}") from None
            if tries == len(WAITS) or not _may_pass(error):
                times = f", {tries + 1} times in a row" if tries else ""
                raise ConnectionError(f"{name}:{number} can't be reached{times}: {reason}") from None
            logger.warning("%s:%d can't be reached, trying again in %g s: %s", name, number, WAITS[tries], reason)
            time.sleep(WAITS[tries])
            tries += 1
            # Where the last row left it: after whole files, and so many rows of the next.
            rows.load_state_dict(rows.state_dict())


def _status(error: Exception) -> int | None:
    """The HTTP status that an error of any client tells of."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _is_connection(error: Exception) -> bool:
    # aiohttp takes long to import, and has raised nothing where it is not.
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
    # By this class itself `datasets` says that its own tries are over; what the system raises are subclasses.
    return type(error) is not ConnectionError
