"""Ctrl-C and termination, taken at a moment of our choosing rather than in the middle of a write."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, the first SIGINT or SIGTERM is remembered for `check`; the next one interrupts at once.

    Outside the main thread, where Python handles no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a signal."""
        if self._pending:
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
