"""FollowedAnswer: a constrained answer, as far as a rank knows it itself.

The rank knows whether the answer is in its free part and whether it is over. What its grammar allows is for the
processes that make masks: they are told the tokens together with the next mask that is wanted. Answers in the middle of
their grammar are followed together (`answer_table.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nvcli.messages import SlotConstraint
from nvcli.runner.mask_messages import WantMask


@dataclass(slots=True, eq=False)
class FollowedAnswer:
    """A constrained answer in a slot."""

    constraint: SlotConstraint
    row: int
    """Its row in the memory of masks."""
    prompt_len: int
    min_tokens: int
    end_ids: frozenset[int]
    is_free: bool
    """Whether it is in its free part: the mark behind which the constraint begins is still to come."""
    num_opening: int | None
    """The tokens of the mark that begins the free part that have come; None: that is decided."""
    num_tokens: int = 0
    num_free: int = 0
    """Its first tokens that are none of its grammar: those of the free part and of the marks around it."""
    is_over: bool = False
    """Whether it has ended; what is still chosen for it is dropped."""
    last_ids: deque[int] = field(default_factory=deque)
    """While it is free, the last tokens, as many as the mark has."""
    unread: list[int] = field(default_factory=list)
    """Tokens of its grammar that the process is still to be told."""
    is_due: bool = True
    """Whether the mask of its next token is still to be asked for."""

    @property
    def next_opening(self) -> int | None:
        """The token that begins the free part, or goes on with beginning it; None: no token does now."""
        return None if self.num_opening is None else self.constraint.opens_with[self.num_opening]

    def take(self, token: int) -> None:
        """Go on by a token that was chosen or is given."""
        if self.is_over or token < 0:  # NOT_FINITE
            return
        was_free, was_short = self.is_free, self.num_tokens < self.min_tokens
        self.num_tokens += 1
        if self._take_free(token):
            self.num_free += 1
        else:
            self.is_over = token in self.end_ids
            self.unread.append(token)
        # All masks of the free part are alike, but that the first ones may hold more back.
        stays = was_free and self.is_free and was_short == (self.num_tokens < self.min_tokens)
        self.is_due = (self.is_due or not stays) and not self.is_over

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

    @property
    def is_steady(self) -> bool:
        """Whether it is inside its grammar, where masks are those of the grammar alone, and stays so to its end."""
        return (
            not self.is_free
            and self.num_opening is None
            and not self.is_over
            and (not self.constraint.stop_ids or self.num_tokens >= self.min_tokens)
        )

    def want_mask(self, number: int) -> WantMask:
        """Ask for the mask of the next token; the number tells it from others of its row."""
        held_back: list[int] = []
        if self.is_free and self.constraint.must_begin:
            held_back += self.constraint.end_ids
        if self.num_tokens < self.min_tokens:
            held_back += self.constraint.stop_ids
        tokens, self.unread = self.unread, []
        self.is_due = False
        return WantMask(self.row, number, tokens, self.is_free, held_back, self.next_opening, bool(self.num_opening))
