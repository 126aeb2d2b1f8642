"""Chunks of bytes → lines, with a bound on how long one may be."""

from __future__ import annotations

from typing import Final

MAX_LINE_BYTES = 512 * 1024 * 1024
"""A longer line is not kept: a file without line ends must not fill the memory."""


class OversizedLine:
    """Stands in for a line of more than `MAX_LINE_BYTES`."""


OVERSIZED: Final = OversizedLine()
Line = bytes | OversizedLine


class LineSplitter:
    """Lines without their newline, whatever the chunks they came in."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_oversized = False

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that end in this chunk."""
        first, *lines = chunk.split(b"\n")
        self._add(first)
        if not lines:
            return []
        last = lines.pop()
        ended: list[Line] = [self._take(), *lines]
        self._add(last)
        return ended

    def end(self) -> Line | None:
        """What follows the last newline, if anything does."""
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
