"""Notices that another program changes an output while rows are written to it: replaces, removes, cuts or edits it.

Before each write and at the end, the output's name must lead to the open file, and the file must have the bytes that
were written. A change that keeps the size is told by the file's time of change, and then the bytes are read again.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from nvcli.errors import OutputError
from nvcli.jobs.file_state import FileState

_READ_BYTES = 1024 * 1024


class OutputGuard:
    """What is known of an open output file."""

    def __init__(self, path: Path, fd: int) -> None:
        """`path` is the name that must lead to the file, and `fd` is the file, opened by this process."""
        self._path = path
        self._fd = fd
        self._state: FileState | None = None
        self._first_byte = 0
        self._checksum = 0
        self.was_touched = False
        """Whether the time of change was another than after our last write, while the size was the same."""

    def begin(self) -> None:
        """Take the file as it is now; what is written from here on is watched. Raises OutputError."""
        self._state = FileState.of(self._fd)
        self._first_byte = self._state.num_bytes
        self.check()

    def check(self) -> None:
        """Raise OutputError if the name leads elsewhere, or the file has another size than after the last write."""
        assert self._state is not None, "`begin` was not called"
        now = FileState.of(self._fd)
        check_place(self._path, self._fd)
        if now.num_bytes != self._state.num_bytes:
            raise _changed(self._path, f"it has {now.num_bytes:,} bytes, and had {self._state.num_bytes:,}")
        if now != self._state:
            self.was_touched = True
            self._state = now

    def wrote(self, data: bytes) -> None:
        """Take note of bytes that were appended. Raises OutputError if the file did not grow by just these."""
        assert self._state is not None, "`begin` was not called"
        expected = self._state.num_bytes + len(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._state = FileState.of(self._fd)
        if self._state.num_bytes != expected:
            raise _changed(self._path, f"it has {self._state.num_bytes:,} bytes, and {expected:,} were written")

    def check_written(self) -> None:
        """Check as `check` does, and read again what was written if the file was touched. Raises OutputError."""
        self.check()
        if self.was_touched and _checksum_from(self._fd, self._first_byte) != self._checksum:
            raise _changed(self._path, "it holds other bytes than were written")


def check_place(path: Path, fd: int) -> None:
    """Raise OutputError if a name does not lead to an open file."""
    try:
        is_there = FileState.of(path).is_same_file(FileState.of(fd))
    except OSError:
        is_there = False
    if not is_there:
        raise _changed(path, "another file has taken its place, or it was removed")


def _checksum_from(fd: int, start: int) -> int:
    checksum = 0
    while chunk := os.pread(fd, _READ_BYTES, start):
        checksum = zlib.crc32(chunk, checksum)
        start += len(chunk)
    return checksum


def _changed(path: Path, what: str) -> OutputError:
    return OutputError(
        f"the output {path} was changed by another program during the run: {what}; rows that it does not hold any more "
        "will be computed again"
    )
