"""Standard streams that fail as a command's should.

Writing to standard error fails where a terminal has gone, a reader of `2>&1 |` has left or a disk is full. Messages
that nobody can read are no reason to stop computing, so these failures are ignored. Output to standard output was asked
for, so its failures count. A caller may have closed any of the three streams.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from nvcli.errors import OutputError


def secure_standard_streams() -> None:
    """Open the standard streams that are closed, so that no file of ours gets their numbers.

    Reading a standard input that was closed fails all the same. From now on standard error never fails; standard output
    fails with an OutputError, or with BrokenPipeError where its reader has left. Characters that its encoding does not
    hold become question marks. `sys.__stdout__` stays None where it was closed.
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
    """Wrap a raw stream. `like` is the stream that Python had made of it; None: it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors=errors,
        line_buffering=like is not None and isinstance(like, io.TextIOWrapper) and like.line_buffering,
    )


class _StandardOutput(io.FileIO):
    """Standard output that fails once. The process's end flushes the buffer again, which need not fail again."""

    _has_failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._has_failed:
                return memoryview(data).nbytes
            self._has_failed = True
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error


class _StandardError(io.FileIO):
    """Standard error that drops what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
