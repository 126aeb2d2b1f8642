"""Results → lines of the output, whole lines only, written soon after they come.

Lines are gathered and handed to the system together: when a mebibyte has come, every two seconds (`tick`) and at the
end. With `order="input"` results wait in memory for those before them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from nvcli.config import Order
from nvcli.errors import ConfigError
from nvcli.jobs.job import JobResult

FLUSH_SECONDS = 2.0
FLUSH_BYTES = 1024 * 1024


class OutputClosed(Exception):
    """Whoever read our standard output has gone (`nvcli … -o - | head`); nobody wants the rest."""


class Sink:
    """Where lines go: a file descriptor. An existing file is emptied by the first write, not before."""

    def __init__(self, fd: int, name: str, *, path: Path | None = None, is_new: bool = False) -> None:
        self._fd = fd
        self._name = name
        self._path = path
        self._is_new = is_new
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._started = path is None

    @classmethod
    def open(cls, path: Path) -> Sink:
        """Raises ConfigError."""
        is_new = not path.exists()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        return cls(fd, str(path), path=path, is_new=is_new)

    def write(self, data: bytes | bytearray) -> None:
        """All of it. Raises OutputClosed, or ConfigError when the device refuses (a full disk)."""
        view = memoryview(data)
        try:
            self._start()
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            raise OutputClosed from None
        except OSError as error:
            raise ConfigError(f"the output {self._name} cannot be written any further: {error.strerror}") from None

    def close(self, *, keep_empty: bool) -> None:
        """Sync to disk. A new file that was never written to is removed again unless `keep_empty`."""
        if keep_empty:
            self._start()
        if self._is_file and self._started:
            os.fsync(self._fd)
        os.close(self._fd)
        if self._path is not None and self._is_new and not self._started:
            self._path.unlink(missing_ok=True)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            if self._is_file:
                os.ftruncate(self._fd, 0)


class ResultWriter:
    """Encodes and orders results. Not thread-safe."""

    def __init__(self, sink: Sink, *, order: Order = "completion") -> None:
        self._sink = sink
        self._encode = msgspec.json.Encoder().encode
        self._lines = bytearray()
        self._last_flush = time.monotonic()
        self._in_order = order == "input"
        self._held: dict[int, bytes] = {}
        self._next_index = 0
        self._is_closed = False

    def write(self, results: Iterable[JobResult]) -> None:
        for result in results:
            line = self._encode(output_row(result))
            if not self._in_order:
                self._lines += line
                self._lines += b"\n"
                continue
            self._held[result.place.index] = line
            while (ready := self._held.pop(self._next_index, None)) is not None:
                self._lines += ready
                self._lines += b"\n"
                self._next_index += 1
        if len(self._lines) >= FLUSH_BYTES:
            self.flush()

    def tick(self) -> None:
        """Call often: flushes what has waited long enough."""
        if self._lines and time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, bytearray()
        self._last_flush = time.monotonic()
        if lines:
            self._sink.write(lines)

    def close(self) -> None:
        """The job came to its end: write what is there, and sync. Idempotent."""
        assert not self._held, "results are missing before those that wait for their turn"
        self._close(keep_empty=True)

    def close_early(self) -> None:
        """The job was cut short: save what can be saved. Does nothing after `close`."""
        self._close(keep_empty=False)

    def _close(self, *, keep_empty: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.flush()
        finally:
            self._sink.close(keep_empty=keep_empty)


def output_row(result: JobResult) -> dict[str, Any]:
    """The native output row: nvcli's own keys first, then what the input row passed through."""
    row: dict[str, Any] = {
        "id": result.place.id,
        "index": result.place.index,
        "choices": result.choices,
        "usage": result.usage,
        "error": result.error,
    }
    for key, value in result.place.extra.items():
        row.setdefault(key, value)  # a key of ours is never overridden
    return row
