"""The rows of an output as lines of JSON: all of them, a random sample, or the one with an id or a number.

A large plain file is not read line by line: it is memory-mapped, and its bytes are searched. A compressed file must be
unpacked from its beginning. Lines that are not output rows, such as a torn last one, are skipped.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvcli.core.system.regular_file import open_regular
from nvcli.errors import ConfigError, first_line
from nvcli.job.compression import CompressionError, compression_of
from nvcli.job.file_formats import check_pyarrow
from nvcli.job.input.csv_source import CsvSource
from nvcli.job.input.line_source import LineSource
from nvcli.job.own_files import is_csv, is_parquet
from nvcli.job.rows.parser import Cells
from nvcli.tools.show.answers import ShownRow, line_of, read_shown_row

_DRAWN_BYTES = 64 << 20
"""Larger files are sampled at random positions; smaller ones are read whole."""
_DRAWS = 4
"""Positions drawn per wanted row: long rows are found more often, and chosen less often."""
_MOST_TRIES = 50
_BATCH_ROWS = 256


class OutputFile(ABC):
    """The rows of one file, each as a line of JSON. All methods raise OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @abstractmethod
    def lines(self) -> Iterator[bytes]:
        """Yield all lines, rows or not, in file order."""

    def lines_with(self, needles: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines that contain one of these byte strings."""
        wanted = list(needles)
        return (line for line in self.lines() if any(needle in line for needle in wanted))

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        """Return this many random rows, in file order, or all if there are fewer."""
        return sample_lines(self.lines(), count, rng)


def open_output_file(path: Path) -> OutputFile:
    """Open an output; its name tells the format. Raises ConfigError for Parquet without a pyarrow that works."""
    if is_parquet(path):
        check_pyarrow(f"{path} is Parquet")
        return _ParquetFile(path)
    return _StreamedFile(path) if is_csv(path) or compression_of(path.name) else _PlainFile(path)


def find_id(file: OutputFile, wanted: str) -> bytes | None:
    """Find the row with an id as typed: `5` may be a text or a number. Returns None if there is none."""
    spelled = {json.dumps(wanted).encode(), json.dumps(wanted, ensure_ascii=False).encode(errors="replace")}
    number = wanted.encode(errors="replace")
    if wanted.removeprefix("-").isdecimal():
        spelled |= {b'id":' + number + end for end in (b",", b"}")} | {b'id": ' + number + end for end in (b",", b"}")}
    return _first(file.lines_with(sorted(spelled)), lambda row: row.id is not None and str(row.id) == wanted)


def find_index(file: OutputFile, wanted: int) -> bytes | None:
    """Find the row with this number in the input, from 0. Returns None if there is none."""
    needles = (b'"index":%d,"choices"' % wanted, b'"batch_req_%d"' % wanted)  # as outputs are written
    found = _first(file.lines_with(needles), lambda row: row.index == wanted)
    return found or _first(file.lines(), lambda row: row.index == wanted)


def _first(lines: Iterable[bytes], is_wanted: Callable[[ShownRow], bool]) -> bytes | None:
    return next((line for line in lines if (row := read_shown_row(line)) is not None and is_wanted(row)), None)


def sample_lines(lines: Iterable[bytes], count: int, rng: random.Random) -> list[bytes]:
    """Draw this many rows from lines, each equally likely, and return them in order."""
    kept: list[tuple[int, bytes]] = []
    rows = (line for line in lines if read_shown_row(line) is not None)
    for number, line in enumerate(rows):
        if number < count:
            kept.append((number, line))
        elif (place := rng.randrange(number + 1)) < count:
            kept[place] = (number, line)
    return [line for _, line in sorted(kept)]


class _PlainFile(OutputFile):
    """A file of lines, which is memory-mapped for searching."""

    def lines(self) -> Iterator[bytes]:
        with open_regular(self._path) as file:
            yield from (line.removesuffix(b"\n") for line in file)

    def lines_with(self, needles: Iterable[bytes]) -> Iterator[bytes]:
        with open_regular(self._path) as file, _mapped(file.fileno()) as data:
            for needle in needles:
                at = data.find(needle)
                while at >= 0:
                    start, end = _line_around(data, at)
                    yield data[start:end]
                    at = data.find(needle, end)

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        if os.stat(self._path).st_size <= _DRAWN_BYTES:
            return sample_lines(self.lines(), count, rng)
        with open_regular(self._path) as file, _mapped(file.fileno()) as data:
            found: dict[int, tuple[float, bytes]] = {}
            for _ in range(_MOST_TRIES * count):
                if len(found) >= _DRAWS * count:
                    break
                start, end = _line_around(data, rng.randrange(len(data)))
                line = data[start:end]
                if start not in found and read_shown_row(line) is not None:
                    # Weighted sampling without replacement (Efraimidis and Spirakis, 2006), by one over the length.
                    found[start] = (rng.expovariate(1.0) * len(line), line)
            chosen = sorted(found, key=lambda start: found[start][0])[:count]
            return [found[start][1] for start in sorted(chosen)]


class _StreamedFile(OutputFile):
    """A file of CSV or TSV, or of compressed lines. Everything after a torn member is left out."""

    def lines(self) -> Iterator[bytes]:
        source = CsvSource if is_csv(self._path) else LineSource
        try:
            for row in source(str(self._path)).lines():
                if isinstance(row, Cells):
                    yield line_of(row)
                elif isinstance(row, bytes):
                    yield row
        except CompressionError:
            return


class _ParquetFile(OutputFile):
    """The rows of one table. A sample reads only the row groups that hold it."""

    def lines(self) -> Iterator[bytes]:
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batch.validate(full=True)
                yield from map(line_of, batch.to_pylist())

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        with self._opened() as file:
            num_rows = file.metadata.num_rows
            chosen = sorted(rng.sample(range(num_rows), min(count, num_rows)))
            lines: list[bytes] = []
            first = 0
            for number in range(file.num_row_groups):
                size = file.metadata.row_group(number).num_rows
                here = [index - first for index in chosen if first <= index < first + size]
                if here:
                    table = file.read_row_group(number)
                    table.validate(full=True)
                    lines += map(line_of, table.take(here).to_pylist())
                first += size
            return lines

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the table, a `pyarrow.parquet.ParquetFile`. Raises ConfigError if it cannot be read."""
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                yield file
        except Exception as error:  # pyarrow raises its own errors, and those of Python types
            raise ConfigError(f"{self._path}: cannot be read as Parquet: {first_line(error)}") from None


def _mapped(fd: int) -> mmap.mmap:
    """Map a file. An empty one, which cannot be mapped, becomes a single byte that is not a row."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else mmap.mmap(-1, 1)


def _line_around(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Return the start and end of the line at a position; a newline belongs to the line before it."""
    end = data.find(b"\n", at)
    return data.rfind(b"\n", 0, at) + 1, len(data) if end < 0 else end
