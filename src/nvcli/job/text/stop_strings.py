"""Finds stop strings in an answer while it grows.

Each token is looked at on its own, so that the outcome does not depend on how many tokens came together. A stop
string may begin in one token and end in another, and a character may be spread over several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
"""The character that decoders show for bytes that are not a complete character (yet)."""

MAX_PENDING_TOKENS = 8
"""More pending tokens than this never become a character, which has at most four bytes."""


class StopStrings:
    """The stop strings of a row, for the search in its answers."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` may be any number of texts, none of them empty."""
        assert all(strings)
        self._strings = strings
        self.longest = max(map(len, strings), default=0)
        """Length of the longest."""
        self._by_end: dict[str, list[str]] = {}
        """Stop strings by their last character, so that most pieces of an answer are searched for none of them."""
        for string in strings:
            self._by_end.setdefault(string[-1], []).append(string)

    def find(self, text: str, begin: int) -> range | None:
        """Return the place of the first stop string in a text, of those that end after `begin`; None if none does."""
        found: range | None = None
        for char in self._by_end.keys() & text[begin:]:
            for string in self._by_end[char]:
                at = text.find(string, max(0, begin - len(string) + 1))
                if at >= 0 and (found is None or (at, len(string)) < (found.start, len(found))):
                    found = range(at, at + len(string))
        return found

    def num_begun(self, text: str) -> int:
        """Return how many characters at the end of a text a stop string may begin with."""
        ends = (text[at:] for at in range(len(text)))
        return len(next((end for end in ends if any(string.startswith(end) for string in self._strings)), ""))


class StopStringDetector:
    """Watches the tokens of an answer for stop strings."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: StopStrings,
        *,
        min_tokens: int = 0,
        keeps_stop: bool = False,
    ) -> None:
        """`decode` gives the text of token ids. A stop string that is complete before `min_tokens` is just text.
        `keeps_stop`: the answer ends after the stop string, not before it."""
        self._decode = decode
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._keeps_stop = keeps_stop
        self._ids: list[int] = []
        # Text of ids[:_read] is known; ids[_context:_read] is decoded again with each new token, because the text of
        # a token may depend on those before it (a leading space, the bytes of one character). `_context_text` is as
        # much of the text from _context on as has been given out.
        self._context = 0
        self._read = 0
        self._context_text = ""
        self._pieces: list[str] = []
        self._tail = ""
        """The end of the pieces, in which a stop string may have begun."""
        self._num_settled_pieces = 0
        self._held_back = ""
        """Text of earlier pieces that `take_settled` has held back."""
        self.text: str | None = None
        """The answer up to the stop string, once that is complete."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens taken; the last one completed the stop string if `text` is set."""
        return len(self._ids)

    def push(self, token_ids: Iterable[int]) -> bool:
        """Take tokens up to one that completes a stop string. Returns True if there is one."""
        assert self.text is None, "the answer has ended"
        for token_id in token_ids:
            self._ids.append(token_id)
            piece = self._next_piece()
            if piece and self._take_piece(piece):
                return True
        return False

    def take_settled(self) -> str:
        """Return the text since the last call that certainly belongs to the answer: no stop string begins in it.

        Call it while the answer goes on.
        """
        text = "".join([self._held_back, *self._pieces[self._num_settled_pieces :]])
        self._num_settled_pieces = len(self._pieces)
        end = len(text) - self._stop_strings.num_begun(self._tail)
        self._held_back = text[end:]
        return text[:end]

    def _next_piece(self) -> str:
        """Return the text added by the last token, without an incomplete character."""
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

    def _take_piece(self, piece: str) -> bool:
        self._pieces.append(piece)
        text, begin = self._tail + piece, len(self._tail)
        self._tail = text[max(0, len(text) - self._stop_strings.longest + 1) :]
        found = self._stop_strings.find(text, begin)
        if found is None or len(self._ids) < self._min_tokens:
            return False
        whole = "".join(self._pieces)
        self.text = whole[: len(whole) - len(text) + (found.stop if self._keeps_stop else found.start)]
        return True
