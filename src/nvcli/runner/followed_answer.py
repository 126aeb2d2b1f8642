"""FollowedAnswer: a constrained answer, how far it has come in its grammar, and the mask of its next token.

What must be known at once when a token comes is kept by the rank's main thread, in plain Python: whether the answer is
in its free part, and whether it is over. What llguidance does (compiling, taking tokens in, making masks) is left for
`make_masks`, which any thread may call. While an answer is in work there (`is_in_work`), only that thread touches its
`matcher`, its `unread` tokens and its row of the masks.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nvcli.grammars import GrammarError, Vocabulary
from nvcli.messages import SlotConstraint
from nvcli.runner.grammar_copies import GrammarCopy

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that forbids nothing."""


@dataclass(slots=True, eq=False)
class FollowedAnswer:
    """A constrained answer in a slot."""

    constraint: SlotConstraint
    copy: GrammarCopy
    mask_row: int
    """Its row of the masks on the host."""
    prompt_len: int
    min_tokens: int
    end_ids: frozenset[int]
    is_free: bool
    """Whether it is in its free part: the mark behind which the constraint begins is still to come."""
    num_opening: int | None
    """The tokens of the mark that begins the free part that have come; None: that is decided."""
    num_tokens: int = 0
    is_over: bool = False
    """Whether it has ended; what is still chosen for it is dropped."""
    last_ids: deque[int] = field(default_factory=deque)
    """While it is free, the last tokens, as many as the mark has."""
    matcher: LLMatcher | None = None
    """None until its first mask is made, and once it has failed."""
    has_failed: bool = False
    """Whether its grammar cannot be followed any further."""
    read: array[int] = field(default_factory=lambda: array("i"))
    """The tokens that the matcher has taken in."""
    unread: list[int] = field(default_factory=list)
    """Tokens that it is still to take in."""
    is_ready: bool = False
    """Whether its row holds the mask of its next token."""
    is_in_work: bool = False
    """Whether another thread has it, or is about to."""
    is_gone: bool = False
    """Whether it has left its slot while it was in work."""
    is_slow: bool = False
    """Whether its last mask, or one that was made together with it, took long."""
    free_mask: tuple[bool, bool] | None = None
    """What the mask in its row holds back, if it is one of the free part: whether the ids that end the answer, and
    whether those that must not come before `min_tokens`."""

    @property
    def next_opening(self) -> int | None:
        """The token that begins the free part, or goes on with beginning it; None: no token does now."""
        return None if self.num_opening is None else self.constraint.opens_with[self.num_opening]

    @property
    def is_short(self) -> bool:
        """Whether the answer has fewer tokens than it must have."""
        return self.num_tokens < self.min_tokens

    def take(self, token: int) -> None:
        """Go on by a token that was chosen or is given. Its mask must be made anew then."""
        if self.is_over or self.has_failed or token < 0:  # NOT_FINITE
            return
        self.num_tokens += 1
        self.is_ready = False
        if not self._take_free(token):
            self.is_over = token in self.end_ids
            self.unread.append(token)

    def _take_free(self, token: int) -> bool:
        """Take a token that belongs to the free part or to the marks around it; False: it does not."""
        if self.num_opening is not None:
            if token != self.next_opening:
                self.num_opening = None
                return False
            self.num_opening += 1
            if self.num_opening == len(self.constraint.opens_with):
                self.num_opening, self.is_free = None, True
            return True
        if not self.is_free:
            return False
        self.last_ids.append(token)
        self.is_free = list(self.last_ids) != self.constraint.starts_after
        self.is_over = token in self.end_ids
        return True

    def make_free_mask(self, words: np.ndarray) -> None:
        """Make the mask of an answer in its free part: words [W] uint32 of its row."""
        wanted = (self.constraint.must_begin, self.is_short)
        if self.free_mask != wanted:
            words[:] = _ALL
            if self.constraint.must_begin:
                _hold_back(words, self.constraint.end_ids)
            if self.is_short:
                _hold_back(words, self.constraint.stop_ids)
            self.free_mask = wanted
        self.is_ready = True

    # ------------------------------------------------------------------ on any thread

    def read_tokens(self, vocabulary: Vocabulary) -> None:
        """Let the matcher take in the tokens that it has not, from the beginning of the grammar if it is to begin."""
        if self.matcher is None:
            try:
                self.matcher = self.copy.begin(vocabulary)
            except GrammarError:  # the parent has compiled it
                self.has_failed = True
                return
        tokens, self.unread = self.unread, []
        self.read.extend(tokens)
        if tokens and not self.matcher.consume_tokens(tokens):
            self.begin_anew(vocabulary)

    @property
    def has_met_error(self) -> bool:
        """Whether the matcher can go no further."""
        return self.matcher is not None and self.matcher.is_error()

    def begin_anew(self, vocabulary: Vocabulary) -> None:
        """Follow a grammar that is compiled for this answer alone, because the matcher has met an error: the memory of
        a grammar that others have followed may be full. The answer has failed if it was alone, or if this does not
        help."""
        self.copy.is_spent, self.matcher = True, None
        if self.copy.num_served > 1:
            with contextlib.suppress(GrammarError):
                matcher = vocabulary.matcher(self.copy.grammar)
                if matcher.consume_tokens(self.read.tolist()):
                    self.matcher = matcher
        self.has_failed = self.matcher is None

    def finish_mask(self, masks: np.ndarray) -> None:
        """Finish the mask that llguidance has written into the answer's row of masks [rows, W] uint32."""
        self.free_mask = None
        if self.has_failed:
            masks[self.mask_row] = _ALL
        if self.num_opening is not None:
            self._let_open(masks[self.mask_row])
        if self.is_short:
            _hold_back(masks[self.mask_row], self.constraint.stop_ids)

    def _let_open(self, mask: np.ndarray) -> None:
        """Allow the token that begins the free part in a mask of uint32 words, in place; and no other once it has
        begun."""
        token = self.next_opening
        assert token is not None
        if self.num_opening:
            mask[:] = 0
        mask[token >> 5] |= np.uint32(1 << (token & 31))


def _hold_back(mask: np.ndarray, token_ids: Sequence[int]) -> None:
    """Forbid tokens in a mask of uint32 words, in place, unless it allows no others."""
    held = np.zeros_like(mask)
    for token in token_ids:
        held[token >> 5] |= np.uint32(1 << (token & 31))
    left = mask & ~held
    if left.any():
        mask[:] = left
