"""Splits a JSON array into its items, without parsing them, and lines where the file holds no array.

An item stays the bytes that it is, so that values are copied as they came and a bad item costs no other row. JSON
libraries that stream (ijson) make objects of values, and give up at the first bad one. Holds one item at a time.
"""

from __future__ import annotations

import re

from nvcli.jobs import line_splitter
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.input.line_source import BOM, DamagedInput, LineSource
from nvcli.jobs.line_splitter import Line, LineSplitter

_INSIDE_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
"""Whole texts, the quote of a text that does not end in the chunk, brackets and commas."""
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING = b"[{"


class ArraySplitter(LineSplitter):
    """Makes the items of one array of chunks that may end anywhere. The array begins with the first chunk."""

    def __init__(self, *, max_bytes: int | None) -> None:
        """An item of more than `max_bytes` is not kept."""
        super().__init__(max_bytes=max_bytes)
        self._level = 0
        """The objects and lists that are open; the array itself is the first one."""
        self._is_in_text = False
        self._is_escaped = False
        """Whether the first byte of the next chunk belongs to a backslash before it."""
        self._num_items = 0
        self._has_ended = False
        self._has_more = False
        """Whether something stands behind the end of the array."""

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items that end in this chunk."""
        ended: list[Line] = []
        if not chunk:
            return ended
        start = 0  # of the current item, as far as it lies in this chunk
        for match in _TOKEN.finditer(chunk, self._end_of_text(chunk, 0) if self._is_in_text else 0):
            if self._has_ended:
                break
            at, token = match.start(), chunk[match.start()]
            if token == _QUOTE:
                if match.end() == at + 1:
                    self._is_in_text = True
                    self._end_of_text(chunk, at + 1)
                    break
            elif token in _OPENING:
                self._level += 1
                start = at + 1 if self._level == 1 else start
            elif token == _COMMA and self._level > 1:
                continue
            elif token == _COMMA or self._level == 1:
                self._add(chunk[start:at])
                ended.append(self._take())
                start = at + 1
                self._has_ended = token != _COMMA
            else:
                self._level -= 1
        rest = chunk[start:]
        if self._has_ended:
            self._has_more = self._has_more or bool(rest.strip())
        else:
            self._add(rest)
        self._num_items += len(ended)
        return ended

    def end(self) -> Line | None:
        """Check that the array has ended, and nothing stands behind it. Raises DamagedInput."""
        if not self._has_ended:
            raise DamagedInput(f"the array does not end; the file ends in its item {self._num_items + 1:,}")
        if self._has_more:
            raise DamagedInput("there is more behind the end of the array; a file of rows on lines is named .jsonl")
        return None

    def _end_of_text(self, chunk: bytes, start: int) -> int:
        """Return where the text that is open at `start` ends in the chunk, and take note where it does not end."""
        if self._is_escaped:
            start, self._is_escaped = start + 1, False
        inside = _INSIDE_STRING.match(chunk, start)
        end = inside.end() if inside is not None else start
        if end >= len(chunk):
            return len(chunk)
        self._is_in_text = chunk[end] != _QUOTE
        self._is_escaped = self._is_in_text
        return end + 1


class JsonSplitter:
    """Splits a file as an array where it begins with one, and into lines where it does not."""

    def __init__(self) -> None:
        self._start: bytes | None = b""
        self.splitter = LineSplitter(max_bytes=line_splitter.MAX_LINE_BYTES)

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items or lines that end in this chunk."""
        if self._start is None:
            return self.splitter.feed(chunk)
        self._start += chunk
        first = self._start.removeprefix(BOM).lstrip()
        if not first or BOM.startswith(self._start):
            return []
        chunk, self._start = self._start, None
        if first.startswith(b"["):
            self.splitter = ArraySplitter(max_bytes=line_splitter.MAX_LINE_BYTES)
        return self.splitter.feed(chunk)

    def end(self) -> Line | None:
        """Return the last line, if there is one that is not given out. Raises DamagedInput."""
        return self.splitter.end() if self._start is None else None


class JsonSource(LineSource):
    """The rows of a `.json` file, once: the items of its array, or its lines."""

    def __init__(self, name: str, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        super().__init__(name, known)
        self._splitter = JsonSplitter()

    def place(self, number: int) -> str:
        """Return what messages call the place of the row that was yielded last: an item of the array, or a line."""
        is_array = isinstance(self._splitter.splitter, ArraySplitter)
        return f"item {number:,}" if is_array else super().place(number)

    def _make_splitter(self) -> JsonSplitter:
        return self._splitter
