"""AnswerTable: the constrained answers in a rank's slots, and which of their masks to request.

Most answers are *steady*: they are inside their grammar, and no token is held back. A step changes only a few numbers
per steady answer, so these are kept in arrays with one entry per row of the mask memory, and Python does the same small
amount of work however many rows a step has. All other answers (in or before a free part, too short to end, or with
tokens that were not sampled here) are followed one by one (`FollowedAnswer`) until they are steady.

A steady answer may be in a run of tokens that must come next (`mask_messages`). No masks are requested in it: the rank
knows them. Its worker hears of the run's tokens when all of them are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nvcli.core.messages import SlotSampling
from nvcli.core.structured import Constraint
from nvcli.worker.masks.mask_messages import WHOLE_RUN, WantMask

_NO_ROW = -1


@dataclass(slots=True)
class _Run:
    """A run of tokens that must come next."""

    tokens: list[int]
    num_taken: int = 0
    """The tokens that the answer has."""


@dataclass(slots=True, eq=False)
class FollowedAnswer:
    """A constrained answer in a slot, as far as the rank itself tracks it.

    The rank knows whether the answer is in its free part and whether it has ended. What the grammar allows is up to the
    mask workers, which get the tokens together with the request for the next mask.
    """

    row: int
    """The answer's row in the mask memory."""
    constraint: Constraint
    sampling: SlotSampling
    """The slot's parameters. Its stop ids must not be chosen before `min_tokens`, unless the grammar allows nothing
    else."""
    is_free: bool = field(init=False)
    """Whether the answer is in its free part, before the mark that starts the constraint."""
    num_opening: int | None = field(init=False)
    """Tokens generated so far of the mark that opens the free part; None once that is decided."""
    last_ids: deque[int] = field(init=False)
    """The last tokens of the free part, up to the length of the mark."""
    num_tokens: int = 0
    num_free: int = 0
    """Leading tokens that are not part of the grammar: the free part and the marks around it."""
    is_over: bool = False
    """Whether the answer has ended; any further token is dropped."""
    unread: list[int] = field(default_factory=list)
    """Tokens of the grammar not yet sent to the worker."""
    is_due: bool = True
    """Whether the mask of the next token has yet to be requested."""

    def __post_init__(self) -> None:
        has_mark = bool(self.constraint.starts_after)
        self.is_free = has_mark and not self.constraint.opens_with
        self.num_opening = 0 if has_mark and self.constraint.opens_with else None
        self.last_ids = deque(maxlen=len(self.constraint.starts_after))

    @property
    def is_short(self) -> bool:
        """Whether the answer has fewer than `min_tokens`."""
        return self.num_tokens < self.sampling.min_tokens

    @property
    def next_opening(self) -> int | None:
        """The next token of the mark that opens the free part; None if no such token may come now."""
        return None if self.num_opening is None else self.constraint.opens_with[self.num_opening]

    def take(self, token: int) -> None:
        """Advance by one token, sampled or given."""
        if self.is_over or token < 0:  # NOT_FINITE
            return
        was_free, was_short = self.is_free, self.is_short
        self.num_tokens += 1
        if self._take_free(token):
            self.num_free += 1
        else:
            self.is_over = token in self.constraint.end_ids
            self.unread.append(token)
        # All masks of the free part are alike, except that the first may hold back more tokens.
        stays = was_free and self.is_free and was_short == self.is_short
        self.is_due = (self.is_due or not stays) and not self.is_over

    def _take_free(self, token: int) -> bool:
        """Take a token of the free part or of the marks around it; return False if it belongs to neither."""
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
        self.is_over = token in self.constraint.end_ids
        return True

    @property
    def is_steady(self) -> bool:
        """Whether the answer is inside its grammar and its masks are the grammar's alone, from here to its end."""
        return (
            not self.is_free
            and self.num_opening is None
            and not self.is_over
            and not (self.sampling.stop_ids and self.is_short)
        )

    def want_mask(self, number: int) -> WantMask:
        """Request the mask of the next token, under a number that is unique in its row."""
        held_back: list[int] = []
        if self.is_free and self.constraint.must_begin:
            held_back += self.constraint.end_ids
        if self.is_short:
            held_back += self.sampling.stop_ids
        tokens, self.unread = self.unread, []
        self.is_due = False
        return WantMask(self.row, number, tokens, self.is_free, held_back, self.next_opening, bool(self.num_opening))


class AnswerTable:
    """The constrained answers of some slots, each with its own row in the mask memory."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.wanted: np.ndarray = np.zeros(num_rows, dtype=np.int64)
        """[rows], the number of the last mask requested for each row."""
        self.last_tokens: np.ndarray = np.zeros(num_rows, dtype=np.int64)
        """[rows], the last token of a steady answer."""
        self._row_of = np.full(num_slots, _NO_ROW, dtype=np.int64)
        self._answers: dict[int, FollowedAnswer] = {}
        """Row → answer. For steady answers, some fields live in the arrays instead."""
        self._is_steady = np.zeros(num_rows, dtype=np.bool_)
        self._is_due = np.zeros(num_rows, dtype=np.bool_)
        """[rows], whether the answer is steady and the mask of its next token has yet to be requested."""
        self._is_over = np.zeros(num_rows, dtype=np.bool_)
        """[rows], whether a steady answer has ended; any further token is dropped."""
        self.num_tokens: np.ndarray = np.zeros(num_rows, dtype=np.int64)
        """[rows], the number of tokens of a steady answer."""
        self.is_in_run: np.ndarray = np.zeros(num_rows, dtype=np.bool_)
        """[rows], whether the answer is in a run."""
        self._runs: dict[int, _Run] = {}
        """Row → the run that its answer is in."""
        self._end_ids = np.zeros((0, 1), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._answers)

    def use_end_ids(self, end_ids: Sequence[int]) -> None:
        """Set the end-of-sequence ids, which all requests share."""
        self._end_ids = np.array(end_ids, dtype=np.int64)[:, None]

    def enter(self, slot: int, answer: FollowedAnswer) -> None:
        """Add an answer."""
        self._answers[answer.row] = answer
        self._row_of[slot] = answer.row
        self._is_steady[answer.row] = self._is_due[answer.row] = False

    def leave(self, slot: int) -> int | None:
        """Remove the answer in a slot. Returns its row, or None if the slot has no answer."""
        row = int(self._row_of[slot])
        if row == _NO_ROW:
            return None
        self._row_of[slot] = _NO_ROW
        del self._answers[row]
        self._is_steady[row] = self._is_due[row] = False
        self._end_run(row)
        return row

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows [n] of the answers in slots [n]."""
        rows: np.ndarray = self._row_of[slots]
        return rows

    def take(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Advance the answers in rows [n] by their sampled tokens [n]."""
        is_steady = self._is_steady[rows]
        if not is_steady.all():
            for row, token in zip(rows[~is_steady].tolist(), tokens[~is_steady].tolist(), strict=True):
                self._answers[row].take(token)
            rows, tokens = rows[is_steady], tokens[is_steady]
        is_taken = (tokens >= 0) & ~self._is_over[rows]  # NOT_FINITE is negative
        if not is_taken.all():
            rows, tokens = rows[is_taken], tokens[is_taken]
        is_end = (tokens == self._end_ids).any(axis=0)
        self.last_tokens[rows] = tokens
        self.num_tokens[rows] += 1
        self._is_over[rows] = is_end
        self._is_due[rows] = ~is_end
        if self._runs:
            is_inside = self.is_in_run[rows]
            for row, token in zip(rows[is_inside].tolist(), tokens[is_inside].tolist(), strict=True):
                self._go_on_in_run(row, [token])

    def take_known(self, slot: int, start: int, tokens: np.ndarray) -> None:
        """Take known tokens of the answer in a slot, the first of which is at position `start` of its request. Tokens
        that the answer already has are skipped."""
        row = int(self._row_of[slot])
        if row == _NO_ROW:
            return
        answer = self._answers[row]
        num_tokens = int(self.num_tokens[row]) if self._is_steady[row] else answer.num_tokens
        first = max(0, answer.sampling.prompt_len + num_tokens - start)
        if first < len(tokens):
            if row in self._runs and self._go_on_in_run(row, tokens[first:].tolist()):
                self.num_tokens[row] += len(tokens) - first
                return
            self._follow_alone(answer)
            for token in tokens[first:].tolist():
                answer.take(token)

    def begin_run(self, row: int, tokens: list[int]) -> None:
        """Note that these tokens must come next in a steady answer, whose last mask has been made: it allows the first
        of them."""
        assert self._is_steady[row]
        assert not self._is_due[row]
        self._runs[row] = _Run(tokens)
        self.is_in_run[row] = True

    def rest_of_run(self, row: int) -> list[int]:
        """Return the tokens of a row's run that its answer does not have yet, at least one."""
        run = self._runs[row]
        return run.tokens[run.num_taken :]

    def _go_on_in_run(self, row: int, tokens: list[int]) -> bool:
        """Take tokens of a run; return False if other tokens are among them."""
        run = self._runs[row]
        end = run.num_taken + len(tokens)
        if run.tokens[run.num_taken : end] != tokens:
            return False
        run.num_taken = end
        is_whole = end == len(run.tokens)
        self._is_over[row] = tokens[-1] in self._end_ids
        self._is_due[row] = is_whole and not self._is_over[row]
        if is_whole:
            self.last_tokens[row] = WHOLE_RUN
            self._end_run(row)
        return True

    def _end_run(self, row: int) -> None:
        self._runs.pop(row, None)
        self.is_in_run[row] = False

    def may_begin_run(self, rows: np.ndarray) -> np.ndarray:
        """Tell which of these rows [n], whose masks have been made, may begin a run: [n] bool."""
        may: np.ndarray = self._is_steady[rows] & ~self.is_in_run[rows]
        return may

    def follow_anew(self, row: int, tokens_of: Callable[[int, int, int], list[int]], *, has_mask: bool) -> None:
        """Restart the answer in a row, as if none of its grammar had been followed yet.

        `tokens_of` returns the tokens of a slot's request between two positions. `has_mask`: whether the last mask
        requested is there.
        """
        answer = self._answers[row]
        self._follow_alone(answer)
        (slot,) = np.flatnonzero(self._row_of == row).tolist()
        start = answer.sampling.prompt_len
        answer.unread = tokens_of(slot, start + answer.num_free, start + answer.num_tokens)
        answer.is_due = (answer.is_due or not has_mask) and not answer.is_over

    def due_rows(self) -> np.ndarray:
        """Return the rows of all steady answers whose next mask has yet to be requested."""
        return np.flatnonzero(self._is_due)

    def want(self, rows: np.ndarray) -> tuple[np.ndarray, list[WantMask]]:
        """Request the masks of rows [n] that have yet to be requested.

        Returns the rows of steady answers, whose tokens are in `last_tokens` and numbers in `wanted`, and the requests
        for the others.
        """
        orders = []
        is_steady = self._is_steady[rows]
        if not is_steady.all():
            for row in rows[~is_steady].tolist():
                answer = self._answers[row]
                if answer.is_due:
                    self.wanted[row] += 1
                    orders.append(answer.want_mask(int(self.wanted[row])))
                    if answer.is_steady:
                        self._make_steady(answer)
        due = rows[self._is_due[rows]]
        self.wanted[due] += 1
        self._is_due[due] = False
        return due, orders

    def _make_steady(self, answer: FollowedAnswer) -> None:
        """Keep an answer in the arrays from now on. Its mask has just been requested."""
        self._is_steady[answer.row] = True
        self._is_due[answer.row] = self._is_over[answer.row] = False
        self.num_tokens[answer.row] = answer.num_tokens

    def _follow_alone(self, answer: FollowedAnswer) -> None:
        """Follow an answer on its own from now on."""
        row = answer.row
        if self._is_steady[row]:
            answer.num_tokens = int(self.num_tokens[row])
            answer.is_over, answer.is_due = bool(self._is_over[row]), bool(self._is_due[row])
            answer.unread = [int(self.last_tokens[row])] if answer.is_due else []
            if row in self._runs:
                answer.unread = self._runs[row].tokens[: self._runs[row].num_taken]
                answer.is_due = bool(answer.unread) and not answer.is_over
                self._end_run(row)
            self._is_steady[row] = self._is_due[row] = False
