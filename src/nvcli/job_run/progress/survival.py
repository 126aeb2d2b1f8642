"""Estimates how long answers become, from those that have ended and those that still run.

Short answers end first. So the mean of the answers that have ended is too small, and what runs must count too: an
answer that runs at 500 tokens says that it is longer than 500. The estimator of Kaplan and Meier (JASA 53, 1958) does
that: for each length, the share of the samples that came so far and ended there, whatever becomes of the others. A
sample that was cut at its `max_tokens` is one that came so far and did not end.

Nothing is known of lengths that no sample has come to. Samples that outgrow all others are expected to become half as
long again, which is little: what follows from it is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from nvcli.job_run.answer_lengths import bin_middle

_OUTGROWN = 1.5
"""Samples that outgrow all others are expected to become this many times as long as they are."""
_SEVERAL = 4
"""Fewer samples than this say little of how long others become."""


class Survival:
    """The distribution of the lengths of one class of samples."""

    def __init__(
        self,
        stopped: Mapping[int, int],
        cut: Mapping[int, int],
        running: Mapping[int, float],
        *,
        expected: float = 0.0,
    ) -> None:
        """Each mapping holds numbers of samples by the bin of their length (`answer_lengths.bin_of`).

        `expected` is the length that samples are expected to have which come further than all that ended; 0: nothing
        says so.
        """
        bins = sorted({*stopped, *cut, *running})
        at_risk: float = sum(stopped.values()) + sum(cut.values()) + sum(running.values())
        self._lengths: list[float] = []
        """The lengths at which samples end, ascending."""
        self._ended: list[float] = []
        """The share of samples that end at each of these lengths or before."""
        left = 1.0
        for number in bins:
            here = running.get(number, 0.0)
            if ended := stopped.get(number, 0):
                # Those that run and are in the bin have come half through it. (The life table of the actuaries.)
                left *= max(0.0, 1 - ended / max(ended, at_risk - here / 2))
                self._lengths.append(bin_middle(number))
                self._ended.append(1 - left)
            at_risk -= ended + cut.get(number, 0) + here
        self.longest = bin_middle(bins[-1]) if bins else 0.0
        """The largest length that any sample has come to."""
        come_so_far = 0.0
        self.seen = 0.0
        """The largest length that several samples have come to; what is said of larger ones is uncertain."""
        for number in reversed(bins):
            come_so_far += stopped.get(number, 0) + cut.get(number, 0) + running.get(number, 0.0)
            if come_so_far >= _SEVERAL:
                self.seen = bin_middle(number)
                break
        self._last = expected if expected > self.longest else _OUTGROWN * self.longest

    def length(self, quantile: float, *, age: float, most: float) -> float:
        """Return the length at a quantile (from 0 to 1) of the samples that have more than `age` tokens, at most
        `most`."""
        before = bisect_right(self._lengths, age)
        ended = self._ended[before - 1] if before else 0.0
        at = bisect_right(self._ended, ended + quantile * (1 - ended))
        length = self._lengths[at] if at < len(self._lengths) else (self._last if self._last > age else _OUTGROWN * age)
        return min(most, max(age, length))
