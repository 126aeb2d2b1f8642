"""DraftEvidence: estimates how many drafts would have been right, from the answers as they come back, without drafting.

Now and then the last tokens of an answer are removed, drafted from what precedes them in the same way as on the ranks
(`nvcli.kernels.drafts`), and compared. So a run learns whether drafts are worth their time before it spends any on
them. Only a few other answers are kept, so what other answers would contribute is a rough estimate.
"""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

from nvcli.core.messages import TOKEN_BYTES, unpack
from nvcli.engine.segment_forest import num_equal
from nvcli.engine.state import RequestState

_OWN_MATCHES, _OTHER_MATCH, _SHORT_MATCH = (8, 4, 3), 3, 2
"""Lengths of the runs of tokens that are searched for, in this order: in the request's own text, in other answers, and
in its own text again."""
_ANSWERS_KEPT = 8
_LONGEST = 8192
"""Maximum tokens of a request that are searched, the latest ones."""


class Outcome(NamedTuple):
    """The result that drafts would have had."""

    num_right: int
    """Drafts that were right, up to the first wrong one."""
    num_drafts: int
    """Drafts that could be compared."""


class DraftEvidence:
    """Evidence about the drafts of one replica."""

    def __init__(self, most: int, accept_rate: float | None = None) -> None:
        """`most`: maximum drafts per row. `accept_rate`: the probability with which the ranks accept each draft, right
        or wrong (`EngineConfig.draft_accept_rate`); None: they accept those that are right."""
        self._most = most
        self._accept_rate = accept_rate
        self._random = random.Random(0)
        self._answers: dict[int, bytes] = {}
        """Request id → the packed tokens of its answer, for the answers looked at most recently."""

    def of(self, state: RequestState) -> Outcome | None:
        """Return how drafts of a request's last tokens would have done; None if it has generated no tokens yet."""
        num_known = min(self._most, len(state.generated))
        if not num_known:
            return None
        if self._accept_rate is not None:
            return Outcome(self._draw(self._accept_rate), self._most)
        cut = state.num_tokens - num_known
        before = state.tokens(max(0, cut - _LONGEST), cut)
        given = state.generated[-num_known:]
        outcome = Outcome(num_equal(given, self._drafts(before.tobytes(), state.request.request_id)), num_known)
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
        """Return the tokens that would be drafted to follow a packed text."""
        for length in _OWN_MATCHES:
            if (end := _end_of_last(text[-length * TOKEN_BYTES :], text[:-TOKEN_BYTES])) is not None:
                return self._following(text, end)
        run = text[-_OTHER_MATCH * TOKEN_BYTES :]
        for number in reversed(self._answers):
            answer = self._answers[number]
            if number != request_id and (end := _end_of_last(run, answer)) is not None:
                return unpack(answer[end : end + self._most * TOKEN_BYTES])
        if (end := _end_of_last(text[-_SHORT_MATCH * TOKEN_BYTES :], text[:-TOKEN_BYTES])) is not None:
            return self._following(text, end)
        return array("i")

    def _following(self, text: bytes, end: int) -> array[int]:
        """Return the drafts that follow byte `end` of a packed text, repeated from there if the text ends first."""
        following = unpack(text[end : end + self._most * TOKEN_BYTES])
        return (following * self._most)[: self._most]


def _end_of_last(run: bytes, text: bytes) -> int | None:
    """Return the byte after the last occurrence of `run` in `text`, both packed tokens; None if there is none."""
    end = len(text)
    while run and (place := text.rfind(run, 0, end)) >= 0:
        if place % TOKEN_BYTES == 0:
            return place + len(run)
        end = place + len(run) - 1
    return None
