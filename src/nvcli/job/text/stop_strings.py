"""Finds stop strings in an answer while it grows.

Each token is looked at on its own, so that the outcome does not depend on how many tokens came together. A stop
string may begin in one token and end in another, and a character may be spread over several tokens.

All stop strings of a row are looked for at once, by the automaton of Aho and Corasick (1975), which reads each
character of an answer once, however many strings there are and however long they are. It is written out here because
answers come in pieces: pyahocorasick (2.3.1) corrupts the heap when some pieces have characters beyond U+FFFF and
others have not (its issue 221), and ahocorasick_rs takes whole texts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
"""The character that decoders show for bytes that are not a complete character (yet)."""

MAX_PENDING_TOKENS = 8
"""More pending tokens than this never become a character, which has at most four bytes."""


class StopStrings:
    """The stop strings of a row, compiled for the search in its answers."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` may be any number of texts, none of them empty."""
        assert all(strings)
        self.root = _Node(0)
        """The empty prefix."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        node = self.root
        for depth, char in enumerate(string, 1):
            node = node.children.setdefault(char, _Node(depth))
        node.longest = len(string)

    def _link(self) -> None:
        """Set `fallback` and `longest` of all nodes, shortest prefixes first."""
        level = list(self.root.children.values())
        for node in level:
            node.fallback = self.root
        while level:
            for node in level:
                for char, child in node.children.items():
                    child.fallback = _next(node.fallback, char) or self.root
                    child.longest = child.longest or child.fallback.longest
            level = [child for node in level for child in node.children.values()]


class _Node:
    """A prefix of some stop strings."""

    __slots__ = ("children", "depth", "fallback", "longest")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """Length of the prefix."""
        self.children: dict[str, _Node] = {}
        """Prefixes longer by one character, by that character."""
        self.fallback: _Node | None = None
        """The longest other prefix that this one ends with; None for the empty prefix."""
        self.longest = 0
        """Length of the longest stop string that this prefix ends with; 0: none."""


def _next(node: _Node | None, char: str) -> _Node | None:
    """Return the longest prefix that `node` and then `char` end with; None if that is the empty one."""
    while node is not None and (child := node.children.get(char)) is None:
        node = node.fallback
    return child if node is not None else None


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
        self._root = self._node = stop_strings.root
        self._num_chars = 0
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
        end = len(text) - self._node.depth  # a stop string may begin with these characters
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
        found = self._find(piece)
        if found is None or len(self._ids) < self._min_tokens:
            return False
        self.text = "".join(self._pieces)[: found.stop if self._keeps_stop else found.start]
        return True

    def _find(self, piece: str) -> range | None:
        """Return the place of the stop string that ends in the next piece, the first of several; None if none does."""
        root, end = self._root, self._num_chars
        self._num_chars += len(piece)
        if self._node is root and root.children.keys().isdisjoint(piece):
            return None  # most pieces
        found: range | None = None
        for char in piece:
            end += 1
            self._node = node = _next(self._node, char) or root
            if node.longest and (found is None or end - node.longest < found.start):
                found = range(end - node.longest, end)
        return found
