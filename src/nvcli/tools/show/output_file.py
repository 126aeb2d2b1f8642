"""The rows of an output as lines of JSON: all of them, some at random, or the one with an id or a number.

What is asked for is found without reading a large file line by line where that is possible: a plain file is mapped, and
its bytes are searched. Lines that are no rows of an output, such as a torn last one, are passed over. A compressed file
has to be unpacked from its beginning.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from nvcli.core.system.regular_file import open_regular
from nvcli.errors import ConfigError
from nvcli.job.compression import READ_BYTES, CompressionError, Unpacker, compression_of
from nvcli.job.input.csv_source import CsvSource
from nvcli.job.line_splitter import LineSplitter
from nvcli.job.own_files import is_csv, is_parquet
from nvcli.job.rows.cells import Cells
from nvcli.tools.show.answers import ShownRow, line_of, read_shown_row

_DRAWN_BYTES = 64 << 20
"""Larger files are sampled at random places; smaller ones are read whole."""
_DRAWS = 4
"""Places drawn for each row that is wanted: a long row is found more often, and chosen less."""
_MOST_TRIES = 50


class OutputFile(Protocol):
    """The rows of one file, each as a line of JSON. All functions raise OSError where it cannot be read."""

    def lines(self) -> Iterator[bytes]:
        """Yield all lines, rows or not, in the order of the file."""

    def lines_with(self, needles: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines that hold one of these bytes."""

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        """Return so many rows at random, in the order of the file, or all where there are not so many."""


def open_output_file(path: Path) -> OutputFile:
    """Open an output by what its name says. Raises ConfigError for a table where pyarrow is missing."""
    if is_parquet(path):
        if find_spec("pyarrow") is None:
            raise ConfigError(f"{path} is Parquet, which needs pyarrow; install it with: pip install pyarrow")
        from nvcli.tools.show.parquet_file import ParquetFile

        return ParquetFile(path)
    if is_csv(path):
        return _CsvFile(path)
    return _PackedFile(path) if compression_of(path.name) else _PlainFile(path)


def find_id(file: OutputFile, wanted: str) -> bytes | None:
    """Find the row with an id, given as it is typed: `5` may be the text or the number. None: there is none."""
    spelled = {json.dumps(wanted).encode(), json.dumps(wanted, ensure_ascii=False).encode(errors="replace")}
    number = wanted.encode(errors="replace")
    if wanted.removeprefix("-").isdecimal():
        spelled |= {b'id":' + number + end for end in (b",", b"}")} | {b'id": ' + number + end for end in (b",", b"}")}
    return _first(file.lines_with(sorted(spelled)), lambda row: row.id is not None and str(row.id) == wanted)


def find_index(file: OutputFile, wanted: int) -> bytes | None:
    """Find the row with a number of the input, counted from 0; None: there is none."""
    needles = (b'"index":%d,"choices"' % wanted, b'"batch_req_%d"' % wanted)  # as outputs are written
    found = _first(file.lines_with(needles), lambda row: row.index == wanted)
    return found or _first(file.lines(), lambda row: row.index == wanted)


def _first(lines: Iterable[bytes], is_wanted: Callable[[ShownRow], bool]) -> bytes | None:
    return next((line for line in lines if (row := read_shown_row(line)) is not None and is_wanted(row)), None)


def sample_lines(lines: Iterable[bytes], count: int, rng: random.Random) -> list[bytes]:
    """Return so many of the lines that are rows at random, each as likely as any other, in their order."""
    kept: list[tuple[int, bytes]] = []
    rows = (line for line in lines if read_shown_row(line) is not None)
    for number, line in enumerate(rows):
        if number < count:
            kept.append((number, line))
        elif (place := rng.randrange(number + 1)) < count:
            kept[place] = (number, line)
    return [line for _, line in sorted(kept)]


class _PlainFile:
    """A file of lines. It is searched while it is mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> Iterator[bytes]:
        with open_regular(self._path) as file:
            yield from map(_without_newline, file)

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


class _ReadFile(ABC):
    """A file that is read from its beginning, whatever is wanted of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @abstractmethod
    def lines(self) -> Iterator[bytes]: ...

    def lines_with(self, needles: Iterable[bytes]) -> Iterator[bytes]:
        wanted = list(needles)
        return (line for line in self.lines() if any(needle in line for needle in wanted))

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        return sample_lines(self.lines(), count, rng)


class _CsvFile(_ReadFile):
    """A CSV or TSV file, compressed or not."""

    def lines(self) -> Iterator[bytes]:
        try:
            yield from (line_of(row.texts) for row in CsvSource(str(self._path)).lines() if isinstance(row, Cells))
        except CompressionError:
            return


class _PackedFile(_ReadFile):
    """A compressed file of lines. What is behind a torn member is left out."""

    def lines(self) -> Iterator[bytes]:
        compression = compression_of(self._path.name)
        unpacker = Unpacker(compression)
        splitter = LineSplitter(max_bytes=None, unwanted=b"\0")
        with open_regular(self._path) as file:
            try:
                while chunk := file.read(READ_BYTES[compression]):
                    for plain in unpacker.feed(chunk):
                        yield from (line for line in splitter.feed(plain) if isinstance(line, bytes))
            except CompressionError:
                return
        last = splitter.end()
        if isinstance(last, bytes):
            yield last


def _mapped(fd: int) -> mmap.mmap:
    """Map a file; an empty one, which cannot be mapped, is one byte that is no row."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else mmap.mmap(-1, 1)


def _line_around(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Return the beginning and the end of the line that holds a place; a newline belongs to the line before it."""
    end = data.find(b"\n", at)
    return data.rfind(b"\n", 0, at) + 1, len(data) if end < 0 else end


def _without_newline(line: bytes) -> bytes:
    return line[:-1] if line.endswith(b"\n") else line
