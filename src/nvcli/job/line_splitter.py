"""Splits chunks of bytes into lines, with a bound on the length of a line where one is wanted."""

from __future__ import annotations

import re

from nvcli.errors import RowError

MAX_LINE_BYTES = 512 * 1024 * 1024
"""Longer lines are dropped, so that a file without line ends does not fill the memory."""


class DroppedLine:
    """Stands for a line that was dropped, because it is too long or holds an unwanted byte."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class BlankLines(DroppedLine):
    """Stands for many blank lines in a row."""

    def __init__(self, data: bytes) -> None:
        """`data` holds the lines, with newlines between them."""
        super().__init__(len(data))
        self.data = data
        self.num_lines = data.count(b"\n") + 1


def too_long() -> RowError:
    """Return the error of a row that is too long."""
    return RowError("line_too_long", f"longer than {MAX_LINE_BYTES >> 20} MiB, the most that a row may have")


Line = bytes | DroppedLine

_RUN_BYTES = 256
_MANY_BLANK = (b"\n" * _RUN_BYTES, b"\r\n" * (_RUN_BYTES // 2))
_BLANK_RUN = re.compile(rb"[\r\n]{%d,}" % _RUN_BYTES)


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
        """Return the lines that end in this chunk. `BlankLines` may stand for many that are blank."""
        if any(many in chunk for many in _MANY_BLANK):
            return self._feed_sparse(chunk)
        return self._feed(chunk)

    def _feed_sparse(self, chunk: bytes) -> list[Line]:
        ended: list[Line] = []
        at = 0
        for run in _BLANK_RUN.finditer(chunk):
            start = chunk.find(b"\n", *run.span()) + 1  # after the line that ends here
            end = chunk.rfind(b"\n", *run.span()) + 1
            if 0 < start < end:
                ended += self._feed(chunk[at:start])
                ended.append(BlankLines(chunk[start : end - 1]))
                at = end
        return ended + self._feed(chunk[at:])

    def _feed(self, chunk: bytes) -> list[Line]:
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
