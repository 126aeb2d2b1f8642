"""Splits chunks of bytes into lines, with a bound on the length of a line."""

from __future__ import annotations

from typing import Final

MAX_LINE_BYTES = 512 * 1024 * 1024
"""A longer line is not kept, so that a file without line ends does not fill the memory."""


class OversizedLine:
    """The stand-in for a line of more than `MAX_LINE_BYTES`."""


OVERSIZED: Final = OversizedLine()
Line = bytes | OversizedLine


class LineSplitter:
    """Makes lines without their newline of chunks that may end anywhere."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_oversized = False

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
        line = self._take()
        return line or None

    def _add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_LINE_BYTES:
            self._is_oversized = True
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _take(self) -> Line:
        line = OVERSIZED if self._is_oversized else b"".join(self._pieces)
        self._pieces, self._num_bytes, self._is_oversized = [], 0, False
        return line
