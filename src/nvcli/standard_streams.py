"""Standard streams that cannot end a run: messages that nobody can read any more are no reason to stop computing.

A terminal that has gone, a reader of `2>&1 |` that has left and a full disk make writing to standard error fail, and a
caller may have closed any of the three.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def secure_standard_streams() -> None:
    """Open those that are closed, so that no file of ours gets their numbers, and let standard error never fail.

    Reading a standard input that was closed fails as before.

    `sys.__stdout__` stays None where standard output was closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR if number else os.O_WRONLY)  # the lowest free number: this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8")
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    raw = _Unfailing(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True
    )


class _Unfailing(io.FileIO):
    """Takes what cannot be written as written."""

    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
