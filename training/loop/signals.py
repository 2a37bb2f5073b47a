"""Signals that ask a run to end."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Signals at most this many seconds apart count as one: a launcher repeats the signal that the terminal sends.
TOGETHER = 1.0


def _nothing(number: int, frame: FrameType | None) -> None:
    """Ignores the end of a child process.

    `SIG_DFL` would do the same, but Python prints an error if it is set after a signal has arrived and before it is
    handled.
    """


class StopSignals:
    """A context in which the first SIGINT or SIGTERM is recorded and does not end the process.

    A later signal has the same effect as outside the context. In threads other than the main one, the context has no
    effect.

    Attributes:
        received: number of the first signal; None if none was received.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # An ignored signal stays ignored: shells start background processes with SIGINT ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._set(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _set(self, number: int, handler: Any) -> None:
        previous = signal.signal(number, handler)
        # The handler is None if it was not set in Python; then it can't be restored.
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
                # The loader's workers may have received the signal too. When one of them ends, torch's own handler
                # would raise an error in the middle of whatever the loop does.
                self._set(signal.SIGCHLD, _nothing)
        elif now - self._since > TOGETHER:
            self._restore()
            signal.raise_signal(number)
