"""A `.json` file as rows: the items of its array, those of the only list of objects in its object, or its lines."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress

from nvcli.jobs import line_splitter
from nvcli.jobs.compression import CompressionError
from nvcli.jobs.input.column_check import ColumnsError, shown_columns
from nvcli.jobs.input.json_array import ArraySplitter
from nvcli.jobs.input.json_object import ObjectOutline
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.input.line_source import BOM, LineSource, Splitter
from nvcli.jobs.line_splitter import BlankLines, Line, LineSplitter
from nvcli.jobs.rows.parser import Row


class JsonSplitter:
    """Splits a file as an array where it begins with one, and into lines where it does not."""

    def __init__(self) -> None:
        self._start: bytes | None = b""
        """The beginning of the file, as long as it may be that of a BOM; None: that is over."""
        self._is_blank = True
        self._splitter = LineSplitter(max_bytes=line_splitter.MAX_LINE_BYTES)
        self.num_blank = 0
        """Blank lines that were given out before the array."""

    @property
    def is_array(self) -> bool:
        return isinstance(self._splitter, ArraySplitter)

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items or lines that end in this chunk."""
        if not self._is_blank:
            return self._splitter.feed(chunk)
        if self._start is not None:
            self._start += chunk
            if BOM.startswith(self._start):
                return []
            chunk, self._start = self._start.removeprefix(BOM), None
        text = chunk.lstrip()
        self._is_blank = not text
        if text.startswith(b"["):
            self._splitter = ArraySplitter(max_bytes=line_splitter.MAX_LINE_BYTES)
            chunk = text
        lines = self._splitter.feed(chunk)
        if self._is_blank:
            self.num_blank += sum(line.num_lines if isinstance(line, BlankLines) else 1 for line in lines)
        return lines

    def end(self) -> Line | None:
        """Return the last line, if there is one that is not given out. Raises DamagedInput."""
        return self._splitter.end()


class _Part:
    """Splits a part of a file, whatever stands before and behind it."""

    def __init__(self, splitter: Splitter, begin: int, end: int | None = None) -> None:
        self._splitter = splitter
        self._num_before = begin
        self._num_left = None if end is None else end - begin

    def feed(self, chunk: bytes) -> list[Line]:
        start = min(self._num_before, len(chunk))
        self._num_before -= start
        part = chunk[start:]
        if self._num_left is not None:
            part = part[: self._num_left]
            self._num_left -= len(part)
        return self._splitter.feed(part)

    def end(self) -> Line | None:
        return self._splitter.end()


class _OneRow(LineSplitter):
    """Makes one row of all bytes."""

    def feed(self, chunk: bytes) -> list[Line]:
        self._add(chunk)
        return []


class JsonSource(LineSource):
    """The rows of a `.json` file, once."""

    def __init__(
        self, name: str, known: KnownInput | None = None, *, has_prompt: Callable[[Collection[str]], bool]
    ) -> None:
        """`known` is the input as it was when the job began, where that is to be checked.

        `has_prompt` tells whether an object with such keys is a row.
        """
        super().__init__(name, known)
        self._has_prompt = has_prompt
        self._splitter: Splitter = JsonSplitter()
        self._is_list = False
        """Whether the rows are the items of a list in an object."""

    def lines(self) -> Iterator[Row | None]:
        """Yield the rows. Raises ColumnsError where it is not clear which they are, and else as `LineSource.lines`."""
        outline = self._outline()
        if outline is not None:
            self._splitter = self._choose(outline)
        yield from self._lines()

    def place(self, number: int) -> str:
        """Return what messages call the place of the row that was yielded last: an item of a list, or a line."""
        splitter = self._splitter
        num_blank = splitter.num_blank if isinstance(splitter, JsonSplitter) else 0
        is_item = self._is_list or (isinstance(splitter, JsonSplitter) and splitter.is_array)
        return f"item {number - num_blank:,}" if is_item else super().place(number)

    def _make_splitter(self) -> Splitter:
        return self._splitter

    def _outline(self) -> ObjectOutline | None:
        """Look through a file as far as the end of the object with which it begins; None: it begins otherwise.

        A pipe cannot be read twice, and is not looked at.
        """
        if not stat.S_ISREG(os.stat(self.name).st_mode):
            return None
        outline, is_blank = ObjectOutline(), True
        chunks = LineSource(self.name, self._known)._chunks()
        with closing(chunks), suppress(CompressionError):  # it comes again, behind the rows before it
            for chunk in chunks:
                assert chunk is not None, "a regular file does not wait"
                if is_blank and (text := chunk.lstrip()):
                    is_blank = False
                    if not text.removeprefix(BOM).lstrip().startswith(b"{"):
                        return None
                outline.feed(chunk)
                if outline.has_more:
                    break
        return outline

    def _choose(self, outline: ObjectOutline) -> Splitter:
        """Return the splitter of a file that begins with an object. Raises ColumnsError."""
        if outline.has_more or (self._has_prompt(outline.keys) and not outline.has_lines):
            return self._splitter
        lists = {} if self._has_prompt(outline.keys) else outline.lists
        if len(lists) > 1:
            first = shlex.quote(f".[{json.dumps(next(iter(lists)))}]")
            raise ColumnsError(
                f"{self.name}: holds one object with several lists of rows: {shown_columns(list(lists))}; take one of "
                f"them out: jq {first} {shlex.quote(self.name)} > rows.json"
            )
        if lists:
            self._is_list = True
            items = ArraySplitter(max_bytes=line_splitter.MAX_LINE_BYTES, is_whole=False)
            return _Part(items, *lists.values())
        if outline.has_lines and outline.has_ended:
            return _Part(_OneRow(max_bytes=line_splitter.MAX_LINE_BYTES), outline.begin, outline.end)
        return self._splitter
