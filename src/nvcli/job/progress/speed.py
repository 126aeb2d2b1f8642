"""Learns how long work takes from the work that was done.

Time is taken to be the sum of four parts: a price for each step, for each token of an answer, for each key that a token
attends to, and for each prompt token that is computed. So steps of few samples are faster, and those of long ones
slower. The prices are those that fit the last seconds best (least squares); where many fit, those near what is usual.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_MEMORY_SECONDS = 15.0
"""Half-life of measurements."""


class Range(NamedTuple, Generic[T]):
    """An estimate with a likely low and high end."""

    low: T
    middle: T
    high: T


class Usual(NamedTuple):
    """Usual prices, relative to that of a token while all slots are busy and contexts are short."""

    steps: float
    """Price of a step divided by the number of slots; that of a token is the rest."""
    prompt_tokens: float
    context: float
    """Number of keys with which a token takes twice as long."""


USUAL_OF_GPU = Usual(steps=0.7, prompt_tokens=0.5, context=500)
USUAL_OF_CPU = Usual(steps=0.2, prompt_tokens=1.0, context=200)
_NOISE = 0.2
"""Usual relative error of a second's measurement."""
_SPREAD = 1.0
"""Usual relative deviation from usual prices."""


class Work(NamedTuple):
    """Amounts of work, each of which has a price."""

    steps: float = 0.0
    tokens: float = 0.0
    keys: float = 0.0
    """Tokens attended to, including those of prompts."""
    prompt_tokens: float = 0.0
    """Prompt tokens that are computed."""

    def minus(self, other: Work) -> Work:
        return Work(*(mine - its for mine, its in zip(self, other, strict=True)))


class Speed:
    """The prices of work, in seconds."""

    def __init__(self, usual: Usual) -> None:
        self._usual = usual
        self._seconds = 0.0
        self._work: Any = 0.0
        """The work of that time."""
        self._products: Any = 0.0
        """The sum of the products of each two amounts of work, over its seconds: noise grows with the root of these."""
        self._prices: Any = None
        self._slots = 1

    def learn(self, work: Work, seconds: float, *, num_running: int) -> None:
        """Learn that the work took `seconds`, with `num_running` samples at a time."""
        import numpy as np  # late: the tokenizer has brought it by then

        self._slots = max(self._slots, num_running)
        if seconds > 0:
            kept, amounts = 0.5 ** (seconds / _MEMORY_SECONDS), np.array(work)
            self._seconds = kept * self._seconds + seconds
            self._work = kept * self._work + amounts
            self._products = kept * self._products + np.outer(amounts, amounts) / seconds
            self._prices = self._fit()

    def seconds(self, work: Work) -> float | None:
        """Return how long work takes; None if nothing has been learned yet."""
        return None if self._prices is None else float(self._prices.dot(work))

    def _fit(self) -> Any:
        """Return the prices, each for an amount of `Work`; None if no work was done."""
        import numpy as np

        steps, prompt_tokens, context = self._usual
        usual = np.array(Work(steps * self._slots, 1 - steps, 1 / context, prompt_tokens))
        if not usual.dot(self._work) > 0:
            return None
        usual *= self._seconds / usual.dot(self._work)  # so that the work done costs the time that it took
        matrix = self._products * np.outer(usual, usual) / _NOISE**2 + np.eye(4) / _SPREAD**2
        target = self._work * usual / _NOISE**2 + 1 / _SPREAD**2
        positive = usual > 0
        while True:
            ratios = np.zeros(4)
            ratios[positive] = np.linalg.solve(matrix[np.ix_(positive, positive)], target[positive])
            if (ratios[positive] > 0).all():
                return ratios * usual
            positive = ratios > 0
