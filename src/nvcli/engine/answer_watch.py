"""AnswerWatch: watches the tokens of an answer as they come back, for requests that ask for it.

It makes two checks. An answer that has started to loop ends there. A thought that has used up its tokens is cut short
by forced tokens. Both checks run at token counts that depend on the answer alone, so the outcome does not depend on how
tokens come back.

A loop found late only wastes some tokens. A thought's limit must not be found late: the request waits at the limit
until its tokens are known (`barrier`), and no other request waits with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from nvcli.core.config_types import MAX_INT64
from nvcli.core.messages import TOKEN_BYTES
from nvcli.core.sampling_params import StopRepetition
from nvcli.engine.request import Request, ThoughtLimit

LOOP_STRIDE = 16
"""Tokens between two checks of an answer for loops."""
_NEEDLE_TOKENS = 8
_NEVER = MAX_INT64


class AnswerWatch:
    """Watches one answer. All numbers count generated tokens."""

    def __init__(self, loop_rule: StopRepetition | None, thought_limit: ThoughtLimit | None) -> None:
        self._loop_rule = loop_rule
        self._thought = None if thought_limit is None else _Thought(thought_limit)
        self._loop_at = _NEVER if loop_rule is None else _next_stride(loop_rule.min_tokens - 1)

    @property
    def barrier(self) -> int:
        """The number of tokens that must be known before more are computed; a huge number if there is no such limit."""
        return _NEVER if self._thought is None else self._thought.due_at

    @property
    def due_at(self) -> int:
        """The number of tokens at which to check the answer next."""
        return min(self._loop_at, self.barrier)

    def is_loop(self, tokens: array[int]) -> bool:
        """Whether the answer (given whole) has started to loop and should end. Callable at any length."""
        if self._loop_rule is None or len(tokens) < self._loop_at:
            return False
        self._loop_at = _next_stride(len(tokens))
        return ends_in_loop(tokens, self._loop_rule)

    def take_forced(self, tokens: array[int]) -> Sequence[int]:
        """Return the tokens that must come next in the answer (given whole), or none if the model chooses. Callable at
        any length."""
        if self._thought is None or len(tokens) < self._thought.due_at:
            return ()
        return self._thought.look(tokens)


def watch_of(request: Request) -> AnswerWatch | None:
    """Return the watch for a request's answer; None for most requests."""
    loop_rule = request.sampling.loop_rule
    if loop_rule is None and request.thought_limit is None:
        return None
    return AnswerWatch(loop_rule, request.thought_limit)


def ends_in_loop(tokens: array[int], rule: StopRepetition) -> bool:
    """Whether the tokens end in a repeated pattern, by this rule."""
    num_needle = max(1, min(_NEEDLE_TOKENS, rule.min_tokens // 2))  # only what every loop repeats
    most = max(rule.min_count * rule.max_pattern_size, rule.min_tokens)
    tail = tokens[-most:].tobytes()
    needle = tail[-num_needle * TOKEN_BYTES :]
    first = max(0, len(tail) - (num_needle + rule.max_pattern_size) * TOKEN_BYTES)
    found = tail.rfind(needle, first, len(tail) - 1)
    while found >= 0:
        period = len(tail) - len(needle) - found
        if period % TOKEN_BYTES == 0:
            length = max(rule.min_count * period, rule.min_tokens * TOKEN_BYTES)
            if length <= len(tail) and tail[-length:-period] == tail[period - length :]:
                return True
        found = tail.rfind(needle, first, found + len(needle) - 1)
    return False


def _next_stride(num_tokens: int) -> int:
    """Return the first multiple of `LOOP_STRIDE` above a number of tokens."""
    return (num_tokens // LOOP_STRIDE + 1) * LOOP_STRIDE


class _Thought:
    """The thought of one answer, as far as it has been read."""

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit = limit
        self._is_open = not limit.start_ids
        self._num_read = 0
        self._num_inside = 0
        """Tokens read between the thought's marks."""
        self.due_at = len(limit.start_ids) + limit.budget

    def look(self, tokens: array[int]) -> Sequence[int]:
        """Read new tokens. Return those that end the thought, if it has used up its budget."""
        limit = self._limit
        ends = [array("i", end) for end in limit.ends]
        start = array("i", limit.start_ids)
        for end in range(self._num_read + 1, len(tokens) + 1):
            if not self._is_open:
                self._is_open = tokens[max(0, end - len(start)) : end] == start
            else:
                self._num_inside += 1
                if any(tokens[max(0, end - len(mark)) : end] == mark for mark in ends):
                    self.due_at = _NEVER
                    return ()
        self._num_read = len(tokens)
        if not self._is_open:
            self.due_at = _NEVER  # it does not think
        elif self._num_inside < limit.budget:
            self.due_at = len(tokens) + limit.budget - self._num_inside
        elif any(_ends_with_beginning(tokens, mark) for mark in ends):
            self.due_at = len(tokens) + 1  # the model is about to end it
        else:
            self.due_at = _NEVER
            return limit.forced_ids
        return ()


def _ends_with_beginning(tokens: array[int], mark: array[int]) -> bool:
    """Whether the tokens end with a prefix of a mark."""
    return any(tokens[-length:] == mark[:length] for length in range(1, len(mark)))
