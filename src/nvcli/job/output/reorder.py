"""Sorts lines by row. Lines that must wait long are kept in a temporary file, not in memory.

This is an external merge: lines wait in memory up to a bound, then go to the file as one sorted run. A run is read back
from its beginning, so only one place and one row of it are remembered, however many lines it holds.
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nvcli.errors import OutputError

_HEADER = struct.Struct("<QQ")
"""The row and the length of a line, which precede it in the file."""
_OVERHEAD = 150
"""Approximate overhead of a waiting line."""


class ReorderBuffer:
    """Takes lines in any order, and yields each after the lines of all earlier rows."""

    def __init__(
        self, next_row: Callable[[int], int] = lambda index: index, *, max_bytes: int, folder: Path | None = None
    ) -> None:
        """`next_row(i)` is the first row from `i` on that will come. The file is in `folder`; None: in TMPDIR."""
        self._next_row = next_row
        self._max_bytes = max_bytes
        self._folder = folder
        self.next_index = next_row(0)
        """The row whose line is due next."""
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._runs: list[tuple[int, bytes, Iterator[tuple[int, bytes]]]] = []
        """Heap of the runs: the next row of each, its line, and the lines after it."""
        self._fd: int | None = None
        self.spilled_bytes = 0
        """Bytes in the file."""

    def __bool__(self) -> bool:
        return bool(self._held or self._runs)

    def add(self, index: int, line: bytes) -> None:
        """Take the line of a row. Raises OutputError when the temporary file cannot be written."""
        self._held[index] = line
        self._held_bytes += len(line) + _OVERHEAD
        if self._held_bytes > self._max_bytes and index != self.next_index:
            self._spill()

    def take(self) -> Iterator[bytes]:
        """Yield the lines that are due."""
        while True:
            line = self._held.pop(self.next_index, None)
            if line is not None:
                self._held_bytes -= len(line) + _OVERHEAD
            elif self._runs and self._runs[0][0] == self.next_index:
                line = self._take_from_run()
            else:
                return
            self.next_index = self._next_row(self.next_index + 1)
            yield line

    def close(self) -> None:
        self._runs.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take_from_run(self) -> bytes:
        _, line, run = self._runs[0]
        if (following := next(run, None)) is not None:
            heapq.heapreplace(self._runs, (*following, run))
        else:
            heapq.heappop(self._runs)
            if not self._runs:
                assert self._fd is not None
                os.ftruncate(self._fd, 0)
                self.spilled_bytes = 0
        return line

    def _spill(self) -> None:
        """Move the lines from memory to the file, as a new run."""
        indices = sorted(self._held)
        try:
            if self._fd is None:
                self._fd = _open_temporary(self._folder)
            start = at = self.spilled_bytes
            for first in range(0, len(indices), 1024):
                lines = [(index, self._held[index]) for index in indices[first : first + 1024]]
                data = b"".join(part for index, line in lines for part in (_HEADER.pack(index, len(line)), line))
                view = memoryview(data)
                while view:
                    written = os.pwrite(self._fd, view, at)
                    view, at = view[written:], at + written
        except OSError as error:
            folder = self._folder or tempfile.gettempdir()
            raise OutputError(
                f"rows that wait for their turn (`job.order: input`) cannot be kept in a temporary file in {folder}: "
                f"{error.strerror}; make room, or raise `job.reorder_memory`"
            ) from None
        self.spilled_bytes = at
        run = _lines_of_run(self._fd, start, at)
        heapq.heappush(self._runs, (*next(run), run))
        self._held.clear()
        self._held_bytes = 0


def _lines_of_run(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the rows and lines in a part of the file."""
    first = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, end - first, prot=mmap.PROT_READ, offset=first) as data:
        at = start - first
        while at < len(data):
            index, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            yield index, data[at : at + length]
            at += length


def _open_temporary(folder: Path | None) -> int:
    """Open a file without a name, which disappears when it is closed or the process ends."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
