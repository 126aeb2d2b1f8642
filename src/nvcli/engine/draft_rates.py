"""DraftRates: how often the drafts of one replica's rows are right.

What is measured is how often each draft is right if those before it are. A draft that was hardly tested is taken to be
right as often as the one before it, so wider steps need not be tried to know what they would give.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROWS_SEEN, _STEPS_SEEN = 64, 10
"""Length of the moving averages: in rows, and at least this many steps."""
_PRIOR_TESTS = 8
"""Number of tests of a later draft that the rate of the one before it counts as."""
_PRIOR_SUREST = 32
"""Number of rows that what is assumed about the surest drafts counts as."""
_LEAST_RANGE = 0.05
"""A step shows how well its drafts were chosen only if the best and the worst choice differ by this many tokens per
row."""
_UNSEEN = 4
"""Number of looks with only wrong drafts that are assumed before the first real one."""


class DraftRates:
    """The rates of the first, second, … draft of a row."""

    def __init__(self, most: int, *, prior: float, prior_rows: int) -> None:
        """`most`: maximum drafts of a row. `prior`: the rate before the first drafts or looks; `prior_rows`: the number
        of rows with drafts that it counts as, or what looks have shown by then."""
        self._prior_rows = prior_rows
        self._rates = [prior] * most
        self._tests = [0.0] * most
        """Number of times that each draft was tested."""
        self.num_rows = 0
        """Number of rows with drafts."""
        self._num_looks = [_UNSEEN] + [0] * (most - 1)
        self._sureness = 0.5
        """How well the surest drafts are chosen: 0: as if at random; 1: wrong ones only where there are no others."""
        self._num_surest = 0
        """Rows from which `_sureness` is known."""

    def shares(self) -> list[float]:
        """Return the share of rows whose first, second, … draft is right."""
        shares: list[float] = []
        rate = 0.0
        for place, (own, tests, looks) in enumerate(zip(self._rates, self._tests, self._num_looks, strict=True)):
            rate = own if place == 0 else rate + (tests + looks) / (tests + looks + _PRIOR_TESTS) * (own - rate)
            shares.append(rate * shares[-1] if place else rate)
        return shares

    def learn(self, counts: Sequence[int], widths: Sequence[int], rates: Sequence[float]) -> None:
        """Learn from rows that had drafts: the number of tokens that each gave, and could give. `rates`: how often the
        drafts of each row are right, for drafts that a row did not have; empty: unknown."""
        num_rows = len(counts)
        self.num_rows += num_rows
        for place in range(max(widths) - 1):
            pairs = zip(counts, widths, strict=True)
            tested: float = sum(count > place and width > place + 1 for count, width in pairs)
            right: float = sum(count > place + 1 for count in counts)
            for rate, width in zip(rates, widths, strict=False):
                if width <= place + 1:
                    tested += rate**place
                    right += rate ** (place + 1)
            if not tested:
                return
            self._tests[place] += tested
            prior = max(self._prior_rows, num_rows / 2) if place == 0 or self._num_looks[place] else 0
            weight = self._weight(tested, self._tests[place] + prior)
            self._rates[place] += weight * (right / tested - self._rates[place])

    def look(self, num_right: int, num_drafts: int) -> None:
        """Learn how drafts would have done for a row."""
        for place in range(min(num_right + 1, num_drafts)):
            self._num_looks[place] += 1
            weight = max(1 / _ROWS_SEEN, 1 / self._num_looks[place])
            self._rates[place] += weight * ((num_right > place) - self._rates[place])

    def surest(self, mean: float, most: int) -> float:
        """Return the tokens that a row can be expected to give if the surest drafts of all rows are kept: `mean` tokens
        per row on average, and at most `most` for one row."""
        worst, best = self._bounds(mean, most)
        return worst + self._sureness * (best - worst)

    def learn_surest(self, mean: float, most: int, counts: Sequence[int]) -> None:
        """Learn from the numbers of tokens that the rows of a step with such drafts gave."""
        worst, best = self._bounds(mean, most)
        if best - worst > _LEAST_RANGE:
            num_rows = len(counts)
            self._num_surest += num_rows
            weight = self._weight(num_rows, self._num_surest + _PRIOR_SUREST)
            given = sum(counts) / num_rows
            self._sureness += weight * ((given - worst) / (best - worst) - self._sureness)

    def _weight(self, num_new: float, num_all: float) -> float:
        """Return how much new tests count in a mean of all."""
        return max(num_new / num_all, min(1 / _STEPS_SEEN, num_new / _ROWS_SEEN))

    def _bounds(self, mean: float, most: int) -> tuple[float, float]:
        """Return the tokens per row if drafts were chosen at random, and if right ones came first."""
        shares = self.shares()[: most - 1]
        whole, rest = divmod(mean - 1, 1)
        worst = 1 + sum(shares[: int(whole)]) + rest * shares[int(whole)]
        return worst, max(worst, 1 + min(mean - 1, sum(shares)))
