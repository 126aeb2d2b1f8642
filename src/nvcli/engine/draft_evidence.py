"""DraftEvidence: how many drafts would have been right, seen from the answers as they come back, without any draft.

Now and then an answer is looked at: its last tokens are taken away and looked up in what precedes them, as the ranks do
(`nvcli.kernels.drafts`), and compared with what is found. So a run learns whether drafts are worth their time before it
spends any on them. Of other answers only a few are kept, so what they give is seen roughly.
"""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

from nvcli.core.messages import unpack
from nvcli.engine.block_manager import TOKEN_BYTES
from nvcli.engine.state import RequestState

_MATCHES = (8, 4, 3, 2)
"""Numbers of equal tokens that are looked for, the most first."""
_LEAST_OWN = 3
"""With fewer equal tokens in its own text, other answers are looked at."""
_ANSWERS_KEPT = 8
_LONGEST = 8192
"""Tokens of a request that are looked at, the latest."""


class Outcome(NamedTuple):
    """The result that drafts would have had."""

    num_right: int
    """The drafts that were right before the first wrong one."""
    num_drafts: int
    """The drafts that could be compared."""


class DraftEvidence:
    """The evidence of one replica."""

    def __init__(self, most: int, accept_rate: float | None = None) -> None:
        """`most`: drafts of a row. `accept_rate`: the probability with which the ranks take drafts, whatever they are
        (`EngineConfig.draft_accept_rate`); None: those that are right."""
        self._most = most
        self._accept_rate = accept_rate
        self._random = random.Random(0)
        self._answers: dict[int, bytes] = {}
        """The packed tokens of answers looked at lately, by the ids of their requests."""

    def of(self, state: RequestState) -> Outcome | None:
        """Return what drafts would have done for the last tokens of a request; None if it has no tokens yet."""
        num_known = min(self._most, len(state.generated))
        if not num_known:
            return None
        if self._accept_rate is not None:
            return Outcome(self._draw(self._accept_rate), self._most)
        if state.request.constraint is not None:
            return Outcome(0, num_known)  # it has no drafts
        cut = state.num_tokens - num_known
        before = state.tokens(max(0, cut - _LONGEST), cut)
        given = state.generated[-num_known:]
        outcome = Outcome(_num_equal(given, self._drafts(before.tobytes(), state.request.request_id)), num_known)
        self._answers.pop(state.request.request_id, None)
        self._answers[state.request.request_id] = state.generated[-_LONGEST:].tobytes()
        if len(self._answers) > _ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        return outcome

    def _draw(self, rate: float) -> int:
        num_right = 0
        while num_right < self._most and self._random.random() < rate:
            num_right += 1
        return num_right

    def _drafts(self, text: bytes, request_id: int) -> array[int]:
        """Return what would be drafted to follow a packed text."""
        for length in _MATCHES:
            if length < _LEAST_OWN:
                break
            if (end := _end_of_last(text[-length * TOKEN_BYTES :], text[:-TOKEN_BYTES])) is not None:
                return self._following(text, end)
        run = text[-_LEAST_OWN * TOKEN_BYTES :]
        for number in reversed(self._answers):
            answer = self._answers[number]
            if number != request_id and (end := _end_of_last(run, answer)) is not None:
                return unpack(answer[end : end + self._most * TOKEN_BYTES])
        if (end := _end_of_last(text[-_MATCHES[-1] * TOKEN_BYTES :], text[:-TOKEN_BYTES])) is not None:
            return self._following(text, end)
        return array("i")

    def _following(self, text: bytes, end: int) -> array[int]:
        """Return the drafts that follow byte `end` of a packed text, which go on from there where it ends."""
        following = unpack(text[end : end + self._most * TOKEN_BYTES])
        return (following * self._most)[: self._most]


def _num_equal(tokens: array[int], drafts: array[int]) -> int:
    """Count the equal tokens at the beginning of both."""
    num_equal = 0
    for token, draft in zip(tokens, drafts, strict=False):
        if token != draft:
            break
        num_equal += 1
    return num_equal


def _end_of_last(run: bytes, text: bytes) -> int | None:
    """Return the byte behind the last place of `run` in a text, both packed tokens; None if it is nowhere."""
    end = len(text)
    while run and (place := text.rfind(run, 0, end)) >= 0:
        if place % TOKEN_BYTES == 0:
            return place + len(run)
        end = place + len(run) - 1
    return None
