"""The input as a stream of rows: files, `.gz` files and standard input, one after the other.

Holds one chunk and one batch at a time, whatever the size of the input. What a line holds never raises; a file that
cannot be read to its end does (ConfigError), after all rows before that place were given out.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from nvcli.errors import ConfigError
from nvcli.jobs.files import STREAM
from nvcli.jobs.job import Job, JobResult
from nvcli.jobs.parser import RowParser

CHUNK_BYTES = 256 * 1024
FIRST_BATCH_ROWS = 8
"""So that the engine has something to do while the next batch is read; batches double from here."""
MAX_BATCH_ROWS = 256
MAX_BATCH_BYTES = 4 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


class RowReader:
    """Gives out the rows of all inputs, once; counts what it has read."""

    def __init__(self, inputs: Sequence[str], parser: RowParser, *, limit: int | None = None) -> None:
        """`limit`: read this many rows and no more."""
        self._inputs = list(inputs)
        self._parser = parser
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._bytes_before = 0
        self.rows_read = 0
        self.bytes_total = _total_bytes(self._inputs)
        """On disk, compressed where they are; None: not known, as with standard input."""

    @property
    def bytes_read(self) -> int:
        """On disk, compressed where they are. Read by another thread, so a little behind or ahead at times."""
        try:
            return self._bytes_before + (self._file.tell() if self._file is not None else 0)
        except (OSError, ValueError):  # a pipe has no position; the file was closed meanwhile
            return self._bytes_before

    def batches(self) -> Iterator[list[Job | JobResult]]:
        """Rows in order. A batch is given out when it is full, and before a read that may have to wait."""
        batch: list[Job | JobResult] = []
        batch_bytes = 0
        target = FIRST_BATCH_ROWS
        lines_before = 0  # in the inputs before this one
        for name in self._inputs:
            number = 0
            try:
                for line in self._lines(name):
                    if line is None:
                        if batch:
                            yield batch
                            batch, batch_bytes = [], 0
                        continue
                    number += 1
                    if not line or line.isspace():
                        continue
                    where = f"line {number}" if len(self._inputs) == 1 else f"line {number} of {_label(name)}"
                    row = self._parser.parse(line, index=self.rows_read, line_id=lines_before + number, where=where)
                    self.rows_read += 1
                    batch.append(row)
                    batch_bytes += len(line)
                    if self._limit is not None and self.rows_read >= self._limit:
                        yield batch
                        return
                    if len(batch) >= target or batch_bytes >= MAX_BATCH_BYTES:
                        yield batch
                        batch, batch_bytes = [], 0
                        target = min(2 * target, MAX_BATCH_ROWS)
            except (OSError, EOFError, zlib.error) as error:
                if batch:
                    yield batch
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConfigError(f"{_label(name)}: cannot be read past line {number}: {reason}") from error
            lines_before += number
        if batch:
            yield batch

    def _lines(self, name: str) -> Iterator[bytes | None]:
        """Lines without their newline; None before each read that may have to wait for a writer."""
        pieces: list[bytes] = []  # of a line that spans chunks
        at_start = True
        with _open(name) as raw:
            is_file = stat.S_ISREG(os.fstat(raw.fileno()).st_mode)
            self._file = raw if is_file else None
            stream = _decompress(name, raw)
            while True:
                if not is_file:
                    yield None
                chunk = stream.read1(CHUNK_BYTES) if hasattr(stream, "read1") else stream.read(CHUNK_BYTES)
                if not chunk:
                    break
                first, *others = chunk.split(b"\n")
                pieces.append(first)
                if not others:
                    continue
                lines = [b"".join(pieces), *others]
                pieces = [lines.pop()]
                if at_start:
                    at_start = False
                    lines[0] = lines[0].removeprefix(_BOM)
                yield from lines
            last = b"".join(pieces)
            if last:
                yield last.removeprefix(_BOM) if at_start else last
            if is_file:
                self._file = None
                self._bytes_before += os.fstat(raw.fileno()).st_size


def _open(name: str) -> IO[bytes]:
    # Unbuffered: a thread that waits in a plain read holds no lock that the interpreter needs in order to exit.
    if name == STREAM:
        return open(0, "rb", buffering=0, closefd=False)
    return open(name, "rb", buffering=0)


def _decompress(name: str, raw: IO[bytes]) -> IO[bytes]:
    if not name.endswith(".gz"):
        return raw
    import gzip

    return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]


def _label(name: str) -> str:
    return "standard input" if name == STREAM else name


def _total_bytes(inputs: Sequence[str]) -> int | None:
    total = 0
    for name in inputs:
        path = Path(name)
        if name == STREAM or not path.is_file():
            return None
        total += path.stat().st_size
    return total
