"""Finds stop strings in an answer while it grows.

Each token is looked at on its own, so that the outcome does not depend on how many tokens came together. A stop
string may begin in one token and end in another, and a character may be spread over several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
"""The character that a decoder shows for bytes that are not a whole character (yet)."""

MAX_PENDING_TOKENS = 8
"""A character has at most four bytes: more pending tokens than this will never become one."""


class StopStringDetector:
    """Takes the tokens of one answer until a stop string is complete."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str], *, min_tokens: int = 0
    ) -> None:
        """`decode` gives the text of token ids. A stop string that is complete before `min_tokens` is just text."""
        assert stop_strings
        assert all(stop_strings)
        self._decode = decode
        self._stop_strings = list(stop_strings)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        # Text of ids[:_read] is known; ids[_context:_read] is decoded again with each new token, because the text of
        # a token may depend on those before it (a leading space, the bytes of one character). `_context_text` is as
        # much of the text from _context on as has been given out.
        self._context = 0
        self._read = 0
        self._context_text = ""
        self._pieces: list[str] = []
        self._num_chars = 0
        self._tail = ""
        self._tail_chars = max(map(len, stop_strings)) - 1
        self.text: str | None = None
        """The answer before the stop string, once that is complete."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken; the last one completed the stop string if `text` is set."""
        return len(self._ids)

    def push(self, token_ids: Iterable[int]) -> bool:
        """Take more tokens, up to the one that completes a stop string. Returns True if there is one."""
        assert self.text is None, "the answer has ended"
        for token_id in token_ids:
            self._ids.append(token_id)
            piece = self._next_piece()
            if piece and self._search(piece):
                return True
        return False

    def _next_piece(self) -> str:
        """Return the text that the last token added, without a character that is incomplete."""
        text = self._decode(self._ids[self._context :])
        is_incomplete = text.endswith(REPLACEMENT)
        is_pending = is_incomplete and len(self._ids) - self._read < MAX_PENDING_TOKENS
        # Bytes that stay broken are text, but the last of them may still begin a character.
        text = text.rstrip(REPLACEMENT) if is_pending else text.removesuffix(REPLACEMENT)
        if len(text) <= len(self._context_text):
            return ""
        piece = text[len(self._context_text) :]
        if is_pending:
            self._context_text = text
        else:
            self._context, self._read = self._read, len(self._ids)
            self._context_text = self._decode(self._ids[self._context :])
            if is_incomplete:
                self._context_text = self._context_text.removesuffix(REPLACEMENT)
        return piece

    def _search(self, piece: str) -> bool:
        window = self._tail + piece
        starts = []
        if len(self._ids) >= self._min_tokens:
            for stop in self._stop_strings:
                # A match that ends within the tail was there before this token.
                start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
                if start >= 0:
                    starts.append(start)
        self._pieces.append(piece)
        if starts:
            num_chars = self._num_chars - len(self._tail) + min(starts)
            self.text = "".join(self._pieces)[:num_chars]
            return True
        self._num_chars += len(piece)
        self._tail = window[max(0, len(window) - self._tail_chars) :]
        return False
