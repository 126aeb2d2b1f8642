"""Estimates the lengths of answers from those that have ended and those still running.

Short answers end first. So the mean of the answers that have ended is too small, and running answers must count too:
one that has 500 tokens so far will be longer than 500. For each length, `Survival` gives the share of the samples that
reached it and ended there, whatever becomes of the others (the Kaplan-Meier estimator, JASA 53, 1958). A sample that
was cut at its `max_tokens` is one that reached that length and did not end.

At lengths that few samples of a class have reached, the samples of all classes say more, rescaled to this class: by
`max_tokens` or by the length of the prompt, if lengths depend on either. Where few samples of any class have got that
far, the rest of an answer is taken to be exponential, with the mean that the longest ones show (`_tail`). Each of the
two counts as one sample (the beta process of Hjort, Ann. Stat. 18, 1990).

Each estimate is made three times (`Range`): for answers as short as they may plausibly be, as expected, and as long as
they may plausibly be.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from nvcli.job.progress.speed import Range
from nvcli.job.run.counts import bin_middle, bin_of, bin_start

_USUAL = 100.0
"""Usual length of answers in tokens. If rows set `max_tokens`, the geometric mean of this and of half of `max_tokens`
takes its place."""
_SEVERAL = 4
"""Number of samples that must have reached a length before it says something about longer ones."""
_TAIL_SHARE = 0.5
"""Share of that length from which samples count as long."""
_POWERS = ((0.0, 0.0, 0.3), (1.0, 0.0, 0.4), (0.0, 0.5, 0.15), (0.0, 1.0, 0.15))
"""Powers of `max_tokens` and of the prompt's length with which lengths may scale, and the prior probability of each
pair."""
_MAX_ENDED = 40.0
"""Maximum number of samples that count as evidence for one of these pairs, because no answers scale exactly like
this."""
_DEVIATIONS = (-1.28, 0.0, 1.28)
"""Distances of the three estimates from the middle, in standard deviations of the counts."""


class Known(NamedTuple):
    """Known samples of one class."""

    most: float
    """Mean `max_tokens`."""
    prompt: float
    """Mean tokens of their prompts."""
    stopped: Mapping[int, float]
    """Number of samples that ended by themselves, by bin of their length (`counts.bin_of`)."""
    cut: Mapping[int, float]
    """The same for samples that reached their `max_tokens`."""
    running: Mapping[int, float]
    """The same for running samples."""

    def num_in(self, number: int) -> float:
        """Return the number of samples in a bin."""
        return self.stopped.get(number, 0) + self.cut.get(number, 0) + self.running.get(number, 0)


class Belief:
    """An estimate of the answer lengths of several classes."""

    def __init__(self, classes: Sequence[Known], *, is_asked: bool) -> None:
        """`is_asked`: rows set their `max_tokens`; otherwise it is the room that the model has."""
        self._most = _geometric_mean([known.most for known in classes])
        self._prompt = _geometric_mean([max(1.0, known.prompt) for known in classes])
        usual = math.sqrt(_USUAL * self._most / 2) if is_asked else _USUAL
        powers = _POWERS if len(classes) > 1 else _POWERS[:1]
        fits = [(self._fit(classes, *pair) + math.log(share), pair) for *pair, share in powers]
        self._powers = max(fits)[1]
        pooled = self._pool(classes)
        self._pooled = [Survival(pooled, _tail(pooled, usual, by), deviations=by) for by in _DEVIATIONS]

    def outlooks(self, known: Known) -> Range[Survival]:
        """Return the distributions of the lengths of one class."""
        stretch = self._stretch(known, *self._powers)
        return Range(
            *(
                Survival(known, _stretched(pooled.share_beyond, stretch), deviations=by)
                for pooled, by in zip(self._pooled, _DEVIATIONS, strict=True)
            )
        )

    def _stretch(self, known: Known, max_power: float, prompt_power: float) -> float:
        """Return the ratio of a class's lengths to those of the mean class."""
        by_prompt = math.pow(max(1.0, known.prompt) / self._prompt, prompt_power)
        return math.pow(known.most / self._most, max_power) * by_prompt

    def _fit(self, classes: Sequence[Known], max_power: float, prompt_power: float) -> float:
        """Return the log-likelihood of the lengths of ended samples, if they scale like this."""
        count = total = squares = 0.0
        for known in classes:
            stretch = self._stretch(known, max_power, prompt_power)
            for counts in (known.stopped, known.cut):
                for number, each in counts.items():
                    length = math.log(max(0.5, bin_middle(number)) / stretch)
                    count += each
                    total += each * length
                    squares += each * length * length
        if not count:
            return 0.0
        return -min(count, _MAX_ENDED) / 2 * math.log(max(0.01, squares / count - (total / count) ** 2))

    def _pool(self, classes: Sequence[Known]) -> Known:
        """Join classes, with their lengths scaled to the mean class."""
        joined: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(3)]
        for known in classes:
            stretch = self._stretch(known, *self._powers)
            for counts, result in zip((known.stopped, known.cut, known.running), joined, strict=True):
                for number, count in counts.items():
                    result[bin_of(round(bin_middle(number) / stretch))] += count
        most = max(known.most / self._stretch(known, *self._powers) for known in classes)
        return Known(most, self._prompt, *joined)


class Survival:
    """The distribution of the answer lengths of one class."""

    def __init__(self, known: Known, believed: Callable[[float], float], *, deviations: float = 0.0) -> None:
        """`believed` gives the prior share of samples longer than a length, and counts as one sample. The result is
        `deviations` standard deviations of the counts away from the middle; above it, answers are longer.
        """
        exponent = math.exp(-deviations / math.sqrt(sum(known.stopped.values()) + _SEVERAL))
        coarse = range(0, bin_of(math.ceil(known.most)) + 1, 4)
        edges = sorted({*coarse, *known.stopped, *known.cut, *known.running, *(number + 1 for number in known.stopped)})
        at_risk = float(sum(known.stopped.values()) + sum(known.cut.values()) + sum(known.running.values()))
        self._lengths = [0.0]
        self._ended = [0.0]
        """Share of samples that have ended before each of these lengths."""
        left = after = 1.0
        for number, end in zip(edges, [*edges[1:], edges[-1] + 1], strict=True):
            before, after = after, believed(bin_start(end) - 0.5)
            stopped, running = known.stopped.get(number, 0), known.running.get(number, 0.0)
            # Running samples in the bin are taken to be halfway through it (the actuarial life table).
            risk = before + max(stopped, at_risk - running / 2)
            left *= max(0.0, 1 - (before - after + stopped) / risk) if risk > 1e-9 else 0.0
            self._lengths.append(float(bin_start(end)))
            self._ended.append(1 - left**exponent)
            at_risk -= known.num_in(number)

    def share_beyond(self, length: float) -> float:
        """Return the share of samples longer than `length`."""
        return 1 - _between(self._lengths, self._ended, length)

    def length(self, quantile: float, *, age: float, most: float) -> float:
        """Return the length at a quantile (0 to 1) of the samples that have more than `age` tokens, capped at
        `most`."""
        ended = _between(self._lengths, self._ended, age) if age else 0.0
        return min(most, max(age, _between(self._ended, self._lengths, ended + quantile * (1 - ended), beyond=most)))


def _tail(known: Known, usual: float, deviations: float) -> Callable[[float], float]:
    """Return a function for the share of samples longer than a length, judging by the longest of `known`.

    Their mean remaining length is the number of tokens that they have beyond a point, divided by the number that ended
    beyond it. As long as none ends, it grows with the length that they have reached, but no faster: they may all end
    together.
    """
    everyone = {number: known.num_in(number) for number in {*known.stopped, *known.cut, *known.running}}
    numbers = sorted(everyone, reverse=True)
    num_there = accumulate(everyone[number] for number in numbers)
    far = (number for number, count in zip(numbers, num_there, strict=True) if count >= _SEVERAL)
    reached = max(1.0, bin_middle(next(far, 0)))
    start = _TAIL_SHARE * reached
    tokens = sum(count * max(0.0, bin_middle(number) - start) for number, count in everyone.items())
    num_ended = sum(count for number, count in known.stopped.items() if bin_middle(number) > start)
    rest = min((tokens + usual) / (num_ended + 1), max(usual, reached))
    rest *= math.exp(deviations / math.sqrt(num_ended + 1))
    return lambda length: math.exp(-length / rest)


def _stretched(share_beyond: Callable[[float], float], stretch: float) -> Callable[[float], float]:
    return lambda length: share_beyond(length / stretch)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _between(places: Sequence[float], values: Sequence[float], place: float, *, beyond: float | None = None) -> float:
    """Interpolate a value between ascending places; past the last one, return its value, or `beyond`."""
    at = bisect_left(places, place)
    if at == len(places):
        return values[-1] if beyond is None else beyond
    if not at or places[at] == places[at - 1]:
        return values[at]
    return values[at - 1] + (values[at] - values[at - 1]) * (place - places[at - 1]) / (places[at] - places[at - 1])
