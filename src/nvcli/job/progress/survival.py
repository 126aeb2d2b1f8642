"""Estimates the lengths of answers from those that have ended and those still running.

Short answers end first. So the mean of the answers that have ended is too small, and what runs must count too: an
answer that runs at 500 tokens says that it is longer than 500. Two estimates do that, one inside the other:

- `Survival`: for each length, the share of the samples that came so far and ended there, whatever becomes of the others
  (the estimator of Kaplan and Meier, JASA 53, 1958). A sample that was cut at its `max_tokens` is one that came so far
  and did not end.
- `Belief`: what happens at lengths that few samples have come to. It weighs distributions of several forms and scales
  by how likely they make the longest samples, and counts for a few samples in the first estimate (the beta process of
  Hjort, Ann. Stat. 18, 1990). Before anything has ended, long answers are between a usual length and half of what rows
  ask for. Whether lengths go with `max_tokens` and with the length of the prompt is weighed too.

Each is made three times (`Range`): for answers as short as they may well become, as expected, and as long.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nvcli.job.progress.speed import Range
from nvcli.job.run.counts import bin_middle, bin_of, bin_start

_USUAL = 250.0
"""Usual length of long answers in tokens, which one in twenty exceeds."""
_SPREAD = 0.6
"""Prior standard deviation of the logarithm of lengths."""
_POWERS = ((0.0, 0.0, 0.3), (1.0, 0.0, 0.4), (0.0, 0.5, 0.15), (0.0, 1.0, 0.15))
"""Powers of `max_tokens` and of the prompt's length that lengths may scale with, and the probability of each pair."""
_STEP = math.log(2) / 3
"""Step in which the belief compares logarithms of lengths."""
_TAIL = 3
"""Number of last steps whose samples it uses, counted from the longest that `_SEVERAL` samples have reached."""
_SEVERAL = 4
_MAX_ENDED = 40.0
"""Maximum weight of samples that ended there, because no answers follow exactly these distributions."""
_BELIEF_SAMPLES = 1.0
"""Number of samples that the belief counts as."""
_WINDOWS = ((0.0, 0.3), (0.25, 0.75), (0.7, 1.0))
"""Parts of the belief, in order of length, that make up the short, middle and long outlook."""
_MAX_HYPOTHESES = 8
"""Maximum number of hypotheses in an outlook."""
_DEVIATIONS = (-1.28, 0.0, 1.28)
"""Distance of the outlooks from the middle, in standard deviations of the counts."""

_ORIGIN = 100
"""Index in tables of a length that equals the scale."""
_LEAST_LOG = -60.0
_NEVER = -1e9
"""Log-likelihood that many samples reach lengths which hardly any reaches."""


class Known(NamedTuple):
    """Known samples of one class."""

    most: float
    """Mean `max_tokens`."""
    prompt: float
    """Mean tokens of their prompts."""
    stopped: Mapping[int, int]
    """Number of samples that ended by themselves, by bin of their length (`counts.bin_of`)."""
    cut: Mapping[int, int]
    """The same for samples that reached their `max_tokens`."""
    running: Mapping[int, float]
    """The same for running samples."""


def _weibull(form: float) -> Callable[[float], float]:
    return lambda length: -math.exp(min(50.0, form * length))


def _log_normal(deviation: float) -> Callable[[float], float]:
    return lambda length: math.log(max(1e-40, 0.5 * math.erfc(length / deviation / math.sqrt(2))))


_FORMS = (
    *map(_weibull, (1.0, 2.0, 5.0, 15.0)),
    *map(_log_normal, (0.3, 0.6, 1.2)),
)
"""Functions from log(length / scale) to the logarithm of the share of samples that are longer."""


class _Hypothesis(NamedTuple):
    form: int
    """Index in `_FORMS`."""
    log_scale: float
    """Logarithm of the scale, for samples with the mean `max_tokens` and prompt."""
    max_power: float
    prompt_power: float


class _Believed(NamedTuple):
    """A distribution for one class, with its probability."""

    weight: float
    form: int
    log_scale: float

    def log_longer(self, log_length: float) -> float:
        return _FORMS[self.form](log_length - self.log_scale)


class Belief:
    """A guess at the lengths of answers where few samples have come so far."""

    def __init__(self, classes: Sequence[Known], *, is_asked: bool) -> None:
        """`is_asked`: rows name their `max_tokens`; otherwise it is the room that the model has."""
        self._log_most = _mean([math.log(known.most) for known in classes])
        self._log_prompt = _mean([math.log(max(1.0, known.prompt)) for known in classes])
        usual = math.log(_USUAL)
        if is_asked:
            usual = (usual + self._log_most - math.log(2)) / 2
        weighed = list(self._weighed(classes, usual))
        best = max(weight for weight, _ in weighed)
        kept = [(math.exp(weight - best), each) for weight, each in weighed if weight > best - 7]
        age = _mean_age(classes)
        kept.sort(key=lambda each: _rest(each[1], age, math.exp(self._log_most)))
        self._windows = [_window(kept, low, high) for low, high in _WINDOWS]

    def outlooks(self, known: Known) -> Range[Survival]:
        """Return the distributions of the lengths of one class."""
        deviation = 1 / math.sqrt(sum(known.stopped.values()) + _SEVERAL)
        survivals = []
        for window, deviations in zip(self._windows, _DEVIATIONS, strict=True):
            shifted = ((weight, each, self._shift(known, each.max_power, each.prompt_power)) for weight, each in window)
            belief = [_Believed(weight, each.form, each.log_scale + shift) for weight, each, shift in shifted]
            survivals.append(Survival(known, belief, exponent=math.exp(-deviations * deviation)))
        return Range(*survivals)

    def _weighed(self, classes: Sequence[Known], usual: float) -> Iterator[tuple[float, _Hypothesis]]:
        """Yield all hypotheses, each with its log-likelihood.

        `usual` is the logarithm of the length that one sample in twenty is expected to pass before anything is known.
        """
        for max_power, prompt_power, share in _POWERS if len(classes) > 1 else _POWERS[:1]:
            shifts = [self._shift(known, max_power, prompt_power) for known in classes]
            tail = _Tail(classes, shifts)
            powers = math.log(share) + _fit(classes, shifts)
            for step in range(2, math.ceil(self._log_most / _STEP) + 9):
                scale = step * _STEP
                for form in range(len(_FORMS)):
                    prior = powers - ((scale + _reach(form) - usual) / _SPREAD) ** 2 / 2
                    yield prior + tail.likelihood(form, step), _Hypothesis(form, scale, max_power, prompt_power)

    def _shift(self, known: Known, max_power: float, prompt_power: float) -> float:
        """Return by how much the logarithm of a class's lengths exceeds the mean."""
        return max_power * (math.log(known.most) - self._log_most) + prompt_power * (
            math.log(max(1.0, known.prompt)) - self._log_prompt
        )


class _Tail:
    """The longest samples."""

    def __init__(self, classes: Sequence[Known], shifts: Sequence[float]) -> None:
        """`shifts` say by how much the logarithm of each class's lengths exceeds the mean."""
        stopped: defaultdict[int, float] = defaultdict(float)
        others: defaultdict[int, float] = defaultdict(float)
        for known, shift in zip(classes, shifts, strict=True):
            for counts, result in ((known.stopped, stopped), (known.cut, others), (known.running, others)):
                for number, count in counts.items():
                    result[round((_log_length(number) - shift) / _STEP)] += count
        self._first = -_ORIGIN
        reached = 0.0
        for step in sorted({*stopped, *others}, reverse=True):
            reached += stopped[step] + others[step]
            if reached >= _SEVERAL:
                self._first = step - _TAIL
                break
        self._stopped = [(step, count) for step, count in stopped.items() if step > self._first]
        self._others = [(step, count) for step, count in others.items() if step > self._first]
        num_stopped = sum(count for _, count in self._stopped)
        self._count = num_stopped + sum(count for _, count in self._others)
        self._weight = min(1.0, _MAX_ENDED / max(1, num_stopped))

    def likelihood(self, form: int, scale: int) -> float:
        """Return the log-likelihood of the tail, if lengths have this form and scale."""
        longer, ends = _tables(form)

        def place(step: int) -> int:
            return max(0, min(2 * _ORIGIN, step - scale + _ORIGIN))

        before = longer[place(self._first)]
        if before < _LEAST_LOG:
            return _NEVER
        result = sum(count * ends[place(step)] for step, count in self._stopped)
        result += sum(count * longer[place(step)] for step, count in self._others)
        return self._weight * (result - self._count * before)


@functools.cache
def _reach(form: int) -> float:
    """Return the logarithm of the length that one sample in twenty exceeds, relative to the scale."""
    longer, _ = _tables(form)
    return _STEP * (next(place for place, share in enumerate(longer) if share < math.log(0.05)) - _ORIGIN)


@functools.cache
def _tables(form: int) -> tuple[list[float], list[float]]:
    """Return by step the logarithm of the share of samples that are longer, and of those that end there."""
    log_longer = _FORMS[form]
    lengths = [_STEP * (number - _ORIGIN) for number in range(2 * _ORIGIN + 1)]
    ends = []
    for length in lengths:
        before, after = log_longer(length - _STEP / 2), log_longer(length + _STEP / 2)
        ends.append(before + math.log(max(1e-40, -math.expm1(after - before))))
    return [log_longer(length) for length in lengths], ends


@functools.cache
def _log_length(number: int) -> float:
    """Return the logarithm of the length in the middle of a bin."""
    return math.log(max(0.5, bin_middle(number)))


def _fit(classes: Sequence[Known], shifts: Sequence[float]) -> float:
    """Return the log-likelihood of the lengths of ended samples, if classes are shifted so."""
    count = total = squares = 0.0
    for known, shift in zip(classes, shifts, strict=True):
        for counts in (known.stopped, known.cut):
            for number, each in counts.items():
                length = _log_length(number) - shift
                count += each
                total += each * length
                squares += each * length * length
    if not count:
        return 0.0
    return -min(count, _MAX_ENDED) / 2 * math.log(max(0.01, squares / count - (total / count) ** 2))


def _window(
    hypotheses: Sequence[tuple[float, _Hypothesis]], low: float, high: float
) -> list[tuple[float, _Hypothesis]]:
    """Return the hypotheses between two quantiles of the weights, renormalised."""
    total = sum(weight for weight, _ in hypotheses)
    window = []
    before = 0.0
    for weight, hypothesis in hypotheses:
        share = min(before + weight, high * total) - max(before, low * total)
        before += weight
        if share > 0:
            window.append((share, hypothesis))
    window.sort(reverse=True)
    window = window[:_MAX_HYPOTHESES]
    whole = sum(weight for weight, _ in window)
    return [(weight / whole, hypothesis) for weight, hypothesis in window]


def _rest(hypothesis: _Hypothesis, age: float, most: float) -> float:
    """Return the expected remaining tokens of a sample of some age."""
    believed = _Believed(1.0, hypothesis.form, hypothesis.log_scale)
    before = believed.log_longer(math.log(max(0.5, age)))
    room = max(1.0, most - age)
    lengths = (age + room * (at + 0.5) / 16 for at in range(16))
    return room * sum(math.exp(max(_LEAST_LOG, believed.log_longer(math.log(each)) - before)) for each in lengths)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_age(classes: Sequence[Known]) -> float:
    """Return the mean length of running samples."""
    count = sum(sum(known.running.values()) for known in classes)
    total = sum(bin_start(number) * each for known in classes for number, each in known.running.items())
    return total / count if count else 0.0


class Survival:
    """The distribution of the lengths of one class of samples."""

    def __init__(self, known: Known, belief: Sequence[_Believed], *, exponent: float = 1.0) -> None:
        """An `exponent` above 1 makes answers shorter, and one below longer."""
        coarse = range(0, bin_of(math.ceil(known.most)) + 1, 4)
        edges = sorted({*coarse, *known.stopped, *known.cut, *known.running, *(number + 1 for number in known.stopped)})
        at_risk: float = sum(known.stopped.values()) + sum(known.cut.values()) + sum(known.running.values())
        self._lengths = [0.0]
        self._ended = [0.0]
        """Share of samples that have ended before each of these lengths."""
        left = believed = 1.0
        for number, end in zip(edges, [*edges[1:], edges[-1] + 1], strict=True):
            log_length = math.log(bin_start(end) - 0.5)
            before, believed = believed, sum(each.weight * math.exp(each.log_longer(log_length)) for each in belief)
            stopped, running = known.stopped.get(number, 0), known.running.get(number, 0.0)
            # Those that run and are in the bin have come half through it. (The life table of the actuaries.)
            risk = _BELIEF_SAMPLES * before + max(stopped, at_risk - running / 2)
            ended = _BELIEF_SAMPLES * (before - believed) + stopped
            left *= max(0.0, 1 - ended / risk) if risk > 1e-9 else 0.0
            self._lengths.append(float(bin_start(end)))
            self._ended.append(1 - left**exponent)
            at_risk -= stopped + known.cut.get(number, 0) + running

    def length(self, quantile: float, *, age: float, most: float) -> float:
        """Return the length at a quantile (from 0 to 1) of the samples that have more than `age` tokens, at most
        `most`."""
        ended = _between(self._lengths, self._ended, age) if age else 0.0
        return min(most, max(age, _between(self._ended, self._lengths, ended + quantile * (1 - ended), beyond=most)))


def _between(places: Sequence[float], values: Sequence[float], place: float, *, beyond: float | None = None) -> float:
    """Interpolate a value between ascending places; past the last one, return its value, or `beyond`."""
    at = bisect_left(places, place)
    if at == len(places):
        return values[-1] if beyond is None else beyond
    if not at or places[at] == places[at - 1]:
        return values[at]
    return values[at - 1] + (values[at] - values[at - 1]) * (place - places[at - 1]) / (places[at] - places[at - 1])
