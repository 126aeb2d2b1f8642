"""RowRates: how often each request's drafts were right lately, and which requests get the drafts of a step.

Requests differ: one copies its prompt, another writes new text. So a step's drafts go where they are likeliest to be
right: draft k of a request whose drafts are right at a rate r counts r^k tokens. Rates are rounded to a few levels,
which makes a choice among hundreds of requests cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from nvcli.engine.state import RequestState

_LEVELS = 16
_KEPT, _KEPT_IDLE = 0.85, 0.97
"""The factors by which a request's counts shrink after a step with drafts for it, and after one in which only others
had drafts. So a request is tried again after some time without drafts."""
_PRIOR = 2.0
"""Number of drafts at the mean rate that are added to a request's own."""
_NEWS = 0.1
"""Weight of a new mean."""


class Plan(NamedTuple):
    """The drafts of a step's rows."""

    by_level: list[int]
    """Number of drafts of the rows of each level."""
    level: int
    """The level of which some rows have one more."""
    num_more: int
    """The number of these rows."""
    num_right: float
    """The number of drafts that can be expected to be right."""


class RowRates:
    """The rates of one replica's requests. A request's own counts are in its `RequestState`."""

    def __init__(self, most: int) -> None:
        """`most`: maximum drafts of a row."""
        self._values = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
        places = [(level, number) for level in range(_LEVELS) for number in range(1, most + 1)]
        self._order = sorted(((self._values[level] ** number, level, number) for level, number in places), reverse=True)
        """(its value, level, number from 1) of each draft, the most valuable first."""
        self._mean = 0.0

    def rate(self, state: RequestState) -> float:
        """Return how often a request's drafts are right, each given that those before it are."""
        if state.request.constraint is not None:
            return 0.0  # it has no drafts
        return (state.drafts_right + _PRIOR * self._mean) / (state.drafts_tried + _PRIOR)

    def saw(self, state: RequestState, num_right: int, num_drafts: int, *, weight: float) -> None:
        """Learn how drafts would have done for a request; `weight`: of this look in the mean of all requests."""
        self._count(state, num_right, num_drafts)
        rate = num_right / (num_right + (num_right < num_drafts))
        self._mean += weight * (rate - self._mean)

    def learn(self, rows: Sequence[RequestState], widths: Sequence[int], counts: Sequence[int]) -> list[float]:
        """Learn from a step with drafts that gave the rows these numbers of tokens; return the rows' rates."""
        for state, width, count in zip(rows, widths, counts, strict=True):
            if width > 1 and count:
                self._count(state, count - 1, width - 1)
            else:
                state.drafts_right *= _KEPT_IDLE
                state.drafts_tried *= _KEPT_IDLE
        rates = [self.rate(state) for state in rows]
        self._mean += _NEWS * (sum(rates) / len(rates) - self._mean)
        return rates

    def _count(self, state: RequestState, num_right: int, num_drafts: int) -> None:
        state.drafts_right = _KEPT * state.drafts_right + num_right
        state.drafts_tried = _KEPT * state.drafts_tried + num_right + (num_right < num_drafts)

    def levels(self, rows: Sequence[RequestState]) -> list[int]:
        """Return the level of each request's rate."""
        return [min(_LEVELS - 1, int(_LEVELS * self.rate(state))) for state in rows]

    def plan(self, levels: Sequence[int], num_drafts: int) -> Plan:
        """Give `num_drafts` drafts to rows of these levels. The rows can have as many."""
        of_level = Counter(levels)
        by_level, num_right = [0] * _LEVELS, 0.0
        for value, level, number in self._order:
            count = of_level[level]
            if count > num_drafts:
                return Plan(by_level, level, num_drafts, num_right + value * num_drafts)
            by_level[level] = number
            num_right += value * count
            num_drafts -= count
        assert not num_drafts
        return Plan(by_level, 0, 0, num_right)

    def widths(self, levels: Sequence[int], plan: Plan) -> list[int]:
        """Return the number of tokens of each row."""
        widths = [1 + plan.by_level[level] for level in levels]
        row = -1
        for _ in range(plan.num_more):
            row = levels.index(plan.level, row + 1)
            widths[row] += 1
        return widths
