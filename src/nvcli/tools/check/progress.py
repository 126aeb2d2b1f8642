"""Shows the progress of a check: a line that is updated in place on a terminal, or else a new line every ten
seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[K"


class CheckProgress:
    """The progress display on standard error."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._seconds = _TERMINAL_SECONDS if self._is_terminal else _PLAIN_SECONDS
        self._started = clock()
        self._next = self._started + self._seconds
        self._has_line = False

    def update(self, rows: int, share: float | None) -> None:
        """Show the number of rows, and the share of the input that was read; None: unknown."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._seconds
        percent = "" if share is None else f"{share:.0%}, "
        text = f"nvcli: {percent}{rows:,} rows, {rows / (now - self._started):,.0f} rows/s"
        self._stream.write(f"{_CLEAR_LINE}{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._has_line = self._is_terminal

    def close(self) -> None:
        """Clear the line on the terminal."""
        if self._has_line:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._has_line = False
