"""Splits chunks of bytes into lines, with a bound on the length of a line where one is wanted."""

from __future__ import annotations

from nvcli.errors import RowError

MAX_LINE_BYTES = 512 * 1024 * 1024
"""Longer lines are dropped, so that a file without line ends does not fill the memory."""


class DroppedLine:
    """Stands for a line that was dropped, because it is too long or holds an unwanted byte."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def too_long() -> RowError:
    """Return the error of a row that is too long."""
    return RowError("line_too_long", f"longer than {MAX_LINE_BYTES >> 20} MiB, the most that a row may have")


Line = bytes | DroppedLine


class LineSplitter:
    """Splits chunks that may end anywhere into lines, without their newlines."""

    def __init__(self, *, max_bytes: int | None, unwanted: bytes | None = None) -> None:
        """Drop lines longer than `max_bytes`, and lines that contain the byte `unwanted`. None: no such rule.

        A line within a single chunk is always returned, because it is in memory anyway.
        """
        self._max_bytes = max_bytes
        self._unwanted = unwanted
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_dropped = False

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the lines that end in this chunk."""
        first, *lines = chunk.split(b"\n")
        self._add(first)
        if not lines:
            return []
        last = lines.pop()
        ended: list[Line] = [self._take(), *lines]
        self._add(last)
        return ended

    def end(self) -> Line | None:
        """Return the line after the last newline, if there is one."""
        return self._take() if self._num_bytes else None

    def _add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if (self._max_bytes is not None and self._num_bytes > self._max_bytes) or (
            self._unwanted is not None and self._unwanted in piece
        ):
            self._is_dropped = True
        if self._is_dropped:
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _take(self) -> Line:
        line = DroppedLine(self._num_bytes) if self._is_dropped else b"".join(self._pieces)
        self._pieces, self._num_bytes, self._is_dropped = [], 0, False
        return line
