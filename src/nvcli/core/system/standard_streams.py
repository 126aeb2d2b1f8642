"""Standard streams that fail in the way a command's should.

Writing to standard error fails if the terminal is gone, the reader of `2>&1 |` has left or the disk is full. Messages
that nobody can read are no reason to stop computing, so such failures are ignored. Standard output carries results, so
its failures count. A caller may have closed any of the three streams.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from nvcli.errors import OutputError


class OutputGone(Exception):
    """The reader of the command's standard output has gone."""


def secure_standard_streams() -> None:
    """Open those standard streams that are closed, so that none of our files gets their descriptors.

    Reading a standard input that was closed still fails. From now on standard error never fails; standard output
    fails with OutputError, or with OutputGone if its reader has left. Characters that its encoding does not
    support become question marks. `sys.__stdout__` stays None if it was closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR if number else os.O_WRONLY)  # the lowest free number: this one
            os.set_inheritable(number, True)
    sys.stdout = _text(_StandardOutput(1, "w", closefd=False), like=sys.stdout, errors="replace")
    sys.stderr = _text(_StandardError(2, "w", closefd=False), like=sys.stderr, errors="backslashreplace")


def _text(raw: io.FileIO, *, like: TextIO | None, errors: str) -> TextIO:
    """Wrap a raw stream. `like` is Python's own stream for it; None: it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors=errors,
        line_buffering=like is not None and isinstance(like, io.TextIOWrapper) and like.line_buffering,
    )


class _StandardOutput(io.FileIO):
    """Standard output that fails only once: the flush at the end of the process does not fail again."""

    _has_failed = False

    def write(self, data: Any) -> int:
        try:
            if sys.__stdout__ is None:
                raise OSError(errno.EBADF, "it is closed")
            return super().write(data)
        except OSError as error:
            if self._has_failed:
                return memoryview(data).nbytes
            self._has_failed = True
            if isinstance(error, BrokenPipeError):
                raise OutputGone from None
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error


class _StandardError(io.FileIO):
    """Standard error that discards what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
