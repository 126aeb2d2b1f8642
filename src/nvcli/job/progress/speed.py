"""Learns how long work takes from the work that was done.

Time is taken to be the sum of four parts: a price for each step, for each token of an answer, for each key that a token
attends to, and for each prompt token that is computed. So steps of few samples are faster, and those of long ones
slower. The prices are those that fit the last seconds best (least squares); where many fit, those near what is usual.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

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
        self._products = [[0.0] * 4 for _ in range(4)]
        self._times = [0.0] * 4
        self._seconds = 0.0
        self._work = Work()
        self._prices: Work | None = None
        self._slots = 1

    def learn(self, work: Work, seconds: float, *, num_running: int) -> None:
        """Learn that the work took `seconds`, with `num_running` samples at a time."""
        self._slots = max(self._slots, num_running)
        if seconds <= 0:
            return
        kept = 0.5 ** (seconds / _MEMORY_SECONDS)
        weight = 1 / seconds  # noise grows with the root of the time
        for row, amount in enumerate(work):
            self._times[row] = kept * self._times[row] + weight * amount * seconds
            for column, other in enumerate(work):
                self._products[row][column] = kept * self._products[row][column] + weight * amount * other
        self._seconds = kept * self._seconds + seconds
        self._work = Work(*(kept * old + new for old, new in zip(self._work, work, strict=True)))
        self._prices = self._fit()

    def seconds(self, work: Work) -> float | None:
        """Return how long work takes; None if nothing has been learned yet."""
        if self._prices is None:
            return None
        return sum(price * amount for price, amount in zip(self._prices, work, strict=True))

    def _fit(self) -> Work | None:
        import numpy as np  # late: the tokenizer has brought it by then

        usual = self._usual_prices()
        if usual is None:
            return None
        scale = np.array(usual)
        matrix = np.array(self._products) * np.outer(scale, scale) / _NOISE**2 + np.eye(4) / _SPREAD**2
        target = np.array(self._times) * scale / _NOISE**2 + 1 / _SPREAD**2
        positive = scale > 0
        while True:
            ratios = np.zeros(4)
            ratios[positive] = np.linalg.solve(matrix[np.ix_(positive, positive)], target[positive])
            if (ratios[positive] > 0).all():
                return Work(*(ratios * scale).tolist())
            positive = ratios > 0

    def _usual_prices(self) -> Work | None:
        """Return usual prices, scaled so that the work done costs the time that it took."""
        steps, prompt_tokens, context = self._usual
        usual = Work(steps * self._slots, 1 - steps, 1 / context, prompt_tokens)
        total = sum(price * amount for price, amount in zip(usual, self._work, strict=True))
        return Work(*(price * self._seconds / total for price in usual)) if total > 0 else None
