"""Outlines the object with which a file begins: which keys it has, and where lists of objects stand in it."""

from __future__ import annotations

import json

from nvcli.jobs.input.json_array import COMMA, OPENING, QUOTE, TOKEN, OpenText

_MAX_KEY_BYTES = 1024
"""Longer keys are cut off."""
_MAX_KEYS = 1000
"""So many keys are told."""
_LIST = b"["[0]


class ObjectOutline:
    """Takes the bytes of a file that begins with an object, in chunks that may end anywhere. Holds no values."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        """The keys of the object, the first ones of very many."""
        self.lists: dict[str, int] = {}
        """Its keys whose values are lists that begin with an object, and where in the file these begin."""
        self.has_ended = False
        self.has_more = False
        """Whether something stands behind the object."""
        self.begin = self.end = 0
        """Where in the file the object begins, and ends if it has ended."""
        self.has_lines = False
        """Whether the object stands on several lines."""
        self._num_bytes = 0
        """Bytes of earlier chunks."""
        self._level = 0
        self._text = OpenText()
        self._key: bytearray | None = None
        """The text of the key that is being read; None: it is read."""
        self._list_at: int | None = None
        """Where the list began that nothing was seen of yet."""

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        start, end = 0, len(chunk) if not self.has_ended else 0
        if self._text.is_open:
            start = self._text.end_in(chunk)
            self._add_to_key(chunk[:start])
        elif self._level == 0 and not self.has_ended:
            start = len(chunk) - len(chunk.lstrip())
            self.begin = self._num_bytes + start
        for match in TOKEN.finditer(chunk, start) if not self.has_ended else ():
            at, token = match.start(), chunk[match.start()]
            if token == QUOTE:
                self._list_at = None
                self._add_to_key(chunk[at : self._text.end_in(chunk, at + 1)])
                if self._text.is_open:
                    break
            elif self._take(token, self._num_bytes + at):
                end = at + 1
                self.end = self._num_bytes + end
                break
        self.has_lines = self.has_lines or b"\n" in chunk[start:end]
        self.has_more = self.has_more or (self.has_ended and bool(chunk[end:].strip()))
        self._num_bytes += len(chunk)

    def _take(self, token: int, at: int) -> bool:
        """Take a bracket or comma, and its place in the file. Returns whether the object ends with it."""
        list_at, self._list_at = self._list_at, None
        if token in OPENING:
            self._level += 1
            if self._level == 1:
                self._key = bytearray()
            elif self._level == 2 and token == _LIST:
                self._list_at = at
            elif list_at is not None and token != _LIST and self.keys and len(self.lists) < _MAX_KEYS:
                self.lists[self.keys[-1]] = list_at
        elif token != COMMA:
            self._level -= 1
            self.has_ended = self._level == 0
        elif self._level == 1:
            self._key = bytearray()
        return self.has_ended

    def _add_to_key(self, text: bytes) -> None:
        """Take a part of a text, which is whole once the text is not open, if it is that of a key."""
        if self._key is None or self._level != 1:
            return
        self._key += text[: _MAX_KEY_BYTES - len(self._key)]
        if not self._text.is_open:
            if len(self.keys) < _MAX_KEYS:
                self.keys.append(_decoded(bytes(self._key)))
            self._key = None


def _decoded(key: bytes) -> str:
    try:
        return str(json.loads(key))
    except ValueError:  # it is cut off, or no JSON
        return key.decode(errors="replace")
