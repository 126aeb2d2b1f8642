"""Standard streams that fail as a command's should.

Messages that nobody can read any more are no reason to stop computing: a terminal that has gone, a reader of `2>&1 |`
that has left and a full disk make writing to standard error fail. What is printed to standard output was asked for. And
a caller may have closed any of the three.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from nvcli.errors import OutputError


def secure_standard_streams() -> None:
    """Open those that are closed, so that no file of ours gets their numbers; reading standard input fails then too.

    Standard error never fails, standard output with an OutputError, or BrokenPipeError where its reader has left; what
    its encoding does not hold becomes a question mark. `sys.__stdout__` stays None where it was closed.
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
    """`like`: what Python had made of it; None: it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors=errors,
        line_buffering=like is not None and isinstance(like, io.TextIOWrapper) and like.line_buffering,
    )


class _StandardOutput(io.FileIO):
    """Fails once: what is still in a buffer then need not be said again when the process ends."""

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
    """Takes what cannot be written as written."""

    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
