"""Ending a run when its process is asked to end."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# A launcher passes on what a terminal has already sent: signals this close to each other, in seconds, are one.
TOGETHER = 1.0


def _nothing(number: int, frame: FrameType | None) -> None:
    """What is left to do when a child ends.

    Not `SIG_DFL`, which does the same: Python prints an error where a signal that has come already, but was not yet
    handled, turns out to have no handler.
    """


class StopSignals:
    """While entered, SIGINT and SIGTERM do not end the process; the first is kept here, to be acted on in time.

    One that comes later does what it would have done without this. Outside the main thread nothing changes.

    Attributes:
        received: the number of the signal that came.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # What is ignored, as by a shell for what it runs in the background, stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._set(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _set(self, number: int, handler: Any) -> None:
        previous = signal.signal(number, handler)
        # None is one that was not set in Python, which can't be set here again.
        self._previous[number] = signal.SIG_DFL if previous is None else previous

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            if hasattr(signal, "SIGCHLD"):
                # The processes that prepare batches may have got it too. When one ends, torch raises an error amid
                # whatever is being done.
                self._set(signal.SIGCHLD, _nothing)
        elif now - self._since > TOGETHER:
            self._restore()
            signal.raise_signal(number)
