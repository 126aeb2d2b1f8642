"""Splits a JSON array into its items, without parsing them.

An item stays the bytes that it is, so that values are copied as they came and a bad item costs no other row. JSON
libraries that stream (ijson) make objects of values, and give up at the first bad one. Holds one item at a time.
"""

from __future__ import annotations

import re

from nvcli.jobs.input.line_source import DamagedInput
from nvcli.jobs.line_splitter import Line, LineSplitter

_INSIDE_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
"""Whole texts, the quote of a text that does not end in the chunk, brackets and commas."""
QUOTE, COMMA = b'",'
OPENING = b"[{"


class OpenText:
    """A text that chunks may end in."""

    def __init__(self) -> None:
        self.is_open = False
        self._is_escaped = False
        """Whether the first byte of the next chunk belongs to a backslash before it."""

    def end_in(self, chunk: bytes, start: int = 0) -> int:
        """Return where the text that is open at `start` ends in the chunk, and take note where it does not end."""
        if self._is_escaped:
            start, self._is_escaped = start + 1, False
        inside = _INSIDE_STRING.match(chunk, start)
        end = inside.end() if inside is not None else start
        if end >= len(chunk):
            self.is_open = True
            return len(chunk)
        self.is_open = self._is_escaped = chunk[end] != QUOTE
        return end + 1


class ArraySplitter(LineSplitter):
    """Makes the items of one array of chunks that may end anywhere. The array begins with the first chunk."""

    def __init__(self, *, max_bytes: int | None, is_whole: bool = True) -> None:
        """An item of more than `max_bytes` is not kept. With `is_whole` nothing may stand behind the array."""
        super().__init__(max_bytes=max_bytes)
        self._is_whole = is_whole
        self._level = 0
        """The objects and lists that are open; the array itself is the first one."""
        self._text = OpenText()
        self._num_items = 0
        self._has_ended = False
        self._has_more = False
        """Whether something stands behind the end of the array."""

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items that end in this chunk."""
        ended: list[Line] = []
        if self._level == 1 and not self._text.is_open and chunk.isspace():
            self._add(b" " if self._num_bytes else b"")  # there may be any amount between items
            return ended
        if not chunk:
            return ended
        start = 0  # of the current item, as far as it lies in this chunk
        for match in TOKEN.finditer(chunk, self._text.end_in(chunk) if self._text.is_open else 0):
            if self._has_ended:
                break
            at, token = match.start(), chunk[match.start()]
            if token == QUOTE:
                if match.end() == at + 1:
                    self._text.end_in(chunk, at + 1)
                    break
            elif token in OPENING:
                self._level += 1
                start = at + 1 if self._level == 1 else start
            elif token == COMMA and self._level > 1:
                continue
            elif token == COMMA or self._level == 1:
                self._add(chunk[start:at])
                ended.append(self._take())
                start = at + 1
                self._has_ended = token != COMMA
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
        if self._has_more and self._is_whole:
            raise DamagedInput("there is more behind the end of the array; a file of rows on lines is named .jsonl")
        return None
