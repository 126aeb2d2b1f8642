"""A file, a pipe or standard input as lines, of bytes or of text. Holds one chunk and one line at a time."""

from __future__ import annotations

import codecs
import os
import select
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import IO, Protocol

from nvcli.errors import RowError
from nvcli.job import line_splitter
from nvcli.job.compression import READ_BYTES, Unpacker, compression_of
from nvcli.job.file_formats import check_stream_format
from nvcli.job.files import STREAM
from nvcli.job.input.column_check import check_no_wide_text
from nvcli.job.input.known_input import KnownInput, ReadCheck
from nvcli.job.line_splitter import DroppedLine, Line, LineSplitter
from nvcli.job.rows.bad_json import explain_bad_utf8
from nvcli.job.rows.parser import Row


class DamagedInput(Exception):
    """An input cannot be read any further, because its format is broken."""


class Splitter(Protocol):
    """Splits the chunks of an input into its lines, or whatever its rows are."""

    def feed(self, chunk: bytes) -> list[Line]: ...
    def end(self) -> Line | None: ...


class Source(ABC):
    """The rows of one input, once."""

    def __init__(self, name: str, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        self.name = name
        self.known = known
        self.bytes_read = 0
        """Bytes read so far, as they are on disk; for a table, the share of the rows read."""
        self.row_bytes = 0
        """Approximate bytes of the last row; 0 for lines."""

    @abstractmethod
    def lines(self) -> Iterator[Row | None]:
        """Yield the rows, and None before each read that may have to wait."""

    @abstractmethod
    def place(self, number: int) -> str:
        """Return the name of the last row's place in messages; it was the `number`-th."""


class LineSource(Source):
    """The lines of one input, once."""

    def lines(self) -> Iterator[Row | None]:
        """Yield the lines, without newlines and the file's BOM, and None before each read that may have to wait.

        Raises OSError, CompressionError or DamagedInput where the input cannot be read on, and InputChanged where it is
        not what it was, after the lines before that place; and ConfigError where standard input is of another format.
        """
        return self._lines()

    def _lines(self) -> Iterator[Line | None]:
        splitter = self._make_splitter()
        at_start = True
        for chunk in self._chunks():
            if chunk is None:
                yield None
                continue
            lines = splitter.feed(chunk)
            if at_start and lines:
                at_start = False
                lines[0] = _without_bom(lines[0])
            yield from lines
        last = splitter.end()
        if last is not None:
            yield _without_bom(last) if at_start else last

    def place(self, number: int) -> str:
        """Return the name of the last row's place in messages; it was the `number`-th."""
        return f"line {number}"

    def _make_splitter(self) -> Splitter:
        return LineSplitter(max_bytes=line_splitter.MAX_LINE_BYTES)

    def _chunks(self) -> Generator[bytes | None, None, None]:
        compression = compression_of(self.name)
        unpacker = Unpacker(compression) if compression else None
        with _open(self.name) as raw:
            check = ReadCheck(self.known, raw.fileno()) if self.known is not None else None
            may_wait = not stat.S_ISREG(os.fstat(raw.fileno()).st_mode)
            while True:
                if may_wait:
                    yield None
                chunk = raw.read(READ_BYTES[compression])
                if chunk is None:  # a pipe that its other users have set not to wait
                    select.select([raw], [], [])
                    continue
                if check is not None:
                    check.take(chunk)
                if not chunk:
                    break
                if self.name == STREAM and not self.bytes_read:
                    check_stream_format(chunk)
                self.bytes_read += len(chunk)
                if unpacker is None:
                    yield chunk
                else:
                    yield from unpacker.feed(chunk)
        if unpacker is not None:
            unpacker.end()


class TextSource(LineSource):
    """The rows of one text file, once: each line is a prompt."""

    def lines(self) -> Iterator[Row | None]:
        """Yield each line as a text, a blank line as it is, and the error of a line that is no UTF-8 text.

        Yields None and raises as `LineSource.lines` does; ColumnsError for UTF-16 and UTF-32 text.
        """
        at_start = True
        for line in self._lines():
            if at_start and isinstance(line, bytes):
                at_start = False
                check_no_wide_text(self.name, line)
            if line is None or isinstance(line, DroppedLine) or not line or line.isspace():
                yield line
                continue
            try:
                yield line.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                yield RowError("invalid_utf8", explain_bad_utf8(line, error.reason))


def _without_bom(line: Line) -> Line:
    return line.removeprefix(codecs.BOM_UTF8) if isinstance(line, bytes) else line


def _open(name: str) -> IO[bytes]:
    # Unbuffered: a thread that waits in a plain read holds no lock that the interpreter needs in order to exit.
    if name == STREAM:
        return open(0, "rb", buffering=0, closefd=False)
    return open(name, "rb", buffering=0)
