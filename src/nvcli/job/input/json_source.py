"""A `.json` file as rows: the items of its array, of the only list of objects in its object, or its lines.

Nothing is parsed. An item stays the bytes that it is, so that values are copied as they came and a bad item costs no
other row. JSON libraries that stream (ijson) make objects of values, and give up at the first bad one. Holds one item
at a time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress

from nvcli.job import line_splitter
from nvcli.job.compression import CompressionError
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.known_input import KnownInput
from nvcli.job.input.line_source import DamagedInput, LineSource, Splitter
from nvcli.job.line_splitter import Line, LineSplitter
from nvcli.job.rows.parser import Row
from nvcli.job.rows.prompt_rules import shown_columns

_INSIDE_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
"""Whole texts, the quote of a text that does not end in the chunk, brackets and commas."""
_QUOTE, _COMMA = b'",'
_OPENING = b"[{"
_MAX_KEY_BYTES = 1024
"""Longer keys are truncated."""
_MAX_KEYS = 1000
"""Maximum number of keys to remember."""
_LIST = b"["[0]


class _Scanner:
    """Tokenizes JSON into strings, brackets and commas, in chunks that may end anywhere."""

    def __init__(self) -> None:
        self.is_in_text = False
        """Whether the last chunk ended inside a text."""
        self._is_escaped = False
        """Whether the first byte of the next chunk belongs to a backslash before it."""

    def scan(self, chunk: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield the first byte, the place and the end of each token. A text may have begun in an earlier chunk, and
        may go on in the next one."""
        at = 0
        if self.is_in_text and chunk:
            at = self._end_text(chunk, 0)
            yield _QUOTE, 0, at
        for match in _TOKEN.finditer(chunk, at):
            at, end = match.span()
            if end == at + 1 and chunk[at] == _QUOTE:
                yield _QUOTE, at, self._end_text(chunk, end)
                return
            yield chunk[at], at, end

    def _end_text(self, chunk: bytes, start: int) -> int:
        """Return where the text that is open at `start` ends in the chunk, and record if it does not end there."""
        if self._is_escaped:
            start, self._is_escaped = start + 1, False
        inside = _INSIDE_STRING.match(chunk, start)
        end = inside.end() if inside is not None else start
        if end >= len(chunk):
            self.is_in_text = True
            return len(chunk)
        self.is_in_text = self._is_escaped = chunk[end] != _QUOTE
        return end + 1


class ArraySplitter(LineSplitter):
    """Splits chunks that may end anywhere into the items of one array."""

    def __init__(self, *, max_bytes: int | None, begin: int | None = None) -> None:
        """An item of more than `max_bytes` is not kept. `begin` is the place of an array that is a part of the file;
        None: the array is the whole file, and nothing may stand after it."""
        super().__init__(max_bytes=max_bytes)
        self._is_whole = begin is None
        self._num_before = begin or 0
        """Bytes before the array that are still to come."""
        self._level = 0
        """Number of open objects and lists, including the array itself."""
        self._scanner = _Scanner()
        self._num_items = 0
        self._has_ended = False
        self._has_more = False
        """Whether anything follows the array."""

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items that end in this chunk."""
        ended: list[Line] = []
        if self._num_before:
            num_bytes = len(chunk)
            chunk = chunk[self._num_before :]
            self._num_before -= num_bytes - len(chunk)
        if self._level == 1 and not self._scanner.is_in_text and chunk.isspace():
            self._add(b" " if self._num_bytes else b"")  # there may be any amount between items
            return ended
        if not chunk:
            return ended
        start = 0  # of the current item, as far as it lies in this chunk
        for token, at, _ in self._scanner.scan(chunk):
            if self._has_ended:
                break
            if token == _QUOTE:
                continue
            if token in _OPENING:
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
        """Check that the array has ended and nothing follows it. Raises DamagedInput."""
        if not self._has_ended:
            raise DamagedInput(f"the array does not end; the file ends in its item {self._num_items + 1:,}")
        if self._has_more and self._is_whole:
            raise DamagedInput("there is more after the end of the array; a file of rows on lines is named .jsonl")
        return None


class ObjectOutline:
    """Finds the keys and lists of the object that a file begins with, in chunks that may end anywhere."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        """The keys of the object, or the first of very many."""
        self.lists: dict[str, int] = {}
        """Keys whose values are lists that begin with an object, and the places of these lists in the file."""
        self.has_ended = False
        self.has_more = False
        """Whether anything follows the object."""
        self.has_lines = False
        """Whether the object spans several lines."""
        self._num_bytes = 0
        """Bytes of earlier chunks."""
        self._level = 0
        self._scanner = _Scanner()
        self._key: bytearray | None = None
        """The key that is being read; None: none is."""
        self._list_at: int | None = None
        """The place of a list that has just begun."""

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        start = len(chunk) - len(chunk.lstrip()) if self._level == 0 else 0
        end = 0 if self.has_ended else len(chunk)
        for token, at, after in self._scanner.scan(chunk) if not self.has_ended else ():
            if token == _QUOTE:
                self._list_at = None
                self._add_to_key(chunk[at:after])
            elif self._take(token, self._num_bytes + at):
                end = after
                break
        self.has_lines = self.has_lines or b"\n" in chunk[start:end]
        self.has_more = self.has_more or (self.has_ended and bool(chunk[end:].strip()))
        self._num_bytes += len(chunk)

    def _take(self, token: int, at: int) -> bool:
        """Take a bracket or comma at its place in the file. Returns whether it ends the object."""
        list_at, self._list_at = self._list_at, None
        if token in _OPENING:
            self._level += 1
            if self._level == 1:
                self._key = bytearray()
            elif self._level == 2 and token == _LIST:
                self._list_at = at
            elif list_at is not None and token != _LIST and self.keys and len(self.lists) < _MAX_KEYS:
                self.lists[self.keys[-1]] = list_at
        elif token != _COMMA:
            self._level -= 1
            self.has_ended = self._level == 0
        elif self._level == 1:
            self._key = bytearray()
        return self.has_ended

    def _add_to_key(self, text: bytes) -> None:
        """Take a piece of a string, if it is a key."""
        if self._key is None or self._level != 1:
            return
        self._key += text[: _MAX_KEY_BYTES - len(self._key)]
        if not self._scanner.is_in_text:
            if len(self.keys) < _MAX_KEYS:
                self.keys.append(_decoded(bytes(self._key)))
            self._key = None


def _decoded(key: bytes) -> str:
    try:
        return str(json.loads(key))
    except ValueError:  # it is cut off, or no JSON
        return key.decode(errors="replace")


class JsonSplitter:
    """Splits a file into the items of an array if it begins with one, and otherwise into lines."""

    def __init__(self) -> None:
        self._start: bytes | None = b""
        """The beginning of the file, while it may be that of a BOM; None afterwards."""
        self._is_blank = True
        self._splitter = LineSplitter(max_bytes=line_splitter.MAX_LINE_BYTES)
        self.num_blank = 0
        """Blank lines before the array."""

    @property
    def is_array(self) -> bool:
        return isinstance(self._splitter, ArraySplitter)

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the items or lines that end in this chunk."""
        if not self._is_blank:
            return self._splitter.feed(chunk)
        if self._start is not None:
            self._start += chunk
            if BOM_UTF8.startswith(self._start):
                return []
            chunk, self._start = self._start.removeprefix(BOM_UTF8), None
        text = chunk.lstrip()
        self._is_blank = not text
        if text.startswith(b"["):
            self._splitter = ArraySplitter(max_bytes=line_splitter.MAX_LINE_BYTES)
            chunk = text
        lines = self._splitter.feed(chunk)
        if self._is_blank:
            self.num_blank += len(lines)
        return lines

    def end(self) -> Line | None:
        """Return the last line, if it has no newline. Raises DamagedInput."""
        return self._splitter.end()


class _OneRow(LineSplitter):
    """Makes a single row of all bytes."""

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

    def lines(self) -> Iterator[Row | None]:
        """Yield the rows. Raises ColumnsError if it is unclear which they are, and as `LineSource.lines` does."""
        outline = self._outline()
        if outline is not None:
            self._splitter = self._choose(outline)
        yield from self._lines()

    def place(self, number: int) -> str:
        """Return the name of the last row's place in messages: an item of a list, or a line."""
        splitter = self._splitter
        if isinstance(splitter, JsonSplitter) and splitter.is_array:
            return f"item {number - splitter.num_blank:,}"
        return f"item {number:,}" if isinstance(splitter, ArraySplitter) else super().place(number)

    def _make_splitter(self) -> Splitter:
        return self._splitter

    def _outline(self) -> ObjectOutline | None:
        """Scan a file to the end of the object that it begins with; None: it begins otherwise.

        Pipes, which cannot be read twice, are not scanned.
        """
        if not stat.S_ISREG(os.stat(self.name).st_mode):
            return None
        outline, is_blank = ObjectOutline(), True
        chunks = LineSource(self.name, self.known)._chunks()
        with closing(chunks), suppress(CompressionError):  # it comes again, after the rows before it
            for chunk in chunks:
                assert chunk is not None, "a regular file does not wait"
                if is_blank and (text := chunk.lstrip()):
                    is_blank = False
                    if not text.removeprefix(BOM_UTF8).lstrip().startswith(b"{"):
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
            return ArraySplitter(max_bytes=line_splitter.MAX_LINE_BYTES, begin=next(iter(lists.values())))
        if outline.has_lines and outline.has_ended:
            return _OneRow(max_bytes=line_splitter.MAX_LINE_BYTES)
        return self._splitter
