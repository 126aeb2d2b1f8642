"""Estimates how much work a run has left.

How long answers become is estimated in three outlooks (`progress.survival`): short, middle and long. In each, the rest
of the run is played through: samples that run go on to their expected lengths, and whenever one ends, the next one
takes its slot. So the end of a run, when a few long answers are left and most slots are empty, takes its time. Rows
that are not read yet are taken to be like those that were read, byte for byte. Large runs are played through with a
part of their slots. `progress.speed` says how long the work takes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nvcli.job.progress.speed import Range, Work
from nvcli.job.progress.survival import Belief, Known, Survival
from nvcli.job.run.counts import AnswerLengths, ClassTotals, LengthClass, ReadTotals, bin_of, length_class

_MAX_SLOTS = 256
"""Runs with more slots than this are simulated on a smaller scale."""
_MAX_RUNNING = 1024
"""Maximum number of running samples to look at."""
_MAX_ROUNDS = 4
"""Waiting samples per slot to simulate; those before them keep all slots busy."""


class RunningSample(NamedTuple):
    """A running sample."""

    length: int
    """Tokens generated so far."""
    max_tokens: int
    num_prompt_tokens: int

    @property
    def length_class(self) -> LengthClass:
        return length_class(self.max_tokens, self.num_prompt_tokens)


class _Sample(NamedTuple):
    """A simulated sample."""

    rest: float
    """Tokens still to be generated."""
    context: float
    """Tokens so far, including the prompt."""


def forecast(
    read: ReadTotals,
    ended: AnswerLengths,
    running: Sequence[RunningSample],
    *,
    num_running: int,
    slots: float,
    share_read: float,
    prompt_tokens: int = 0,
    computed_share: float = 1.0,
    uncached_share: float = 1.0,
) -> Range[Work] | None:
    """Estimate the remaining work; None if no row was read.

    `running` are some of the `num_running` samples that run, evenly chosen. `slots` is how many run while others
    wait. `share_read` is the share of the rows that this run has to answer and has read, above 0 and at most 1.
    `prompt_tokens` were computed or found in the prefix cache. `computed_share` of the rows are computed, the others
    being equal to one of them; `uncached_share` of the prompt tokens are.
    """
    running = running[:: math.ceil(len(running) / _MAX_RUNNING) or 1]
    weight = num_running / max(1, len(running))
    classes = dict(read.classes)  # the feeder's thread adds to them
    if not classes:
        return None
    outlooks = _outlooks(classes, ended, running, weight)
    by_class = Counter(sample.length_class for sample in running)
    waiting: dict[LengthClass, float] = {}
    for key, totals in classes.items():
        missing = totals.samples - ended.classes[key].samples - weight * by_class[key]
        waiting[key] = computed_share * (max(0.0, missing) + totals.samples * (1 / share_read - 1))
    prompts = max(0.0, weight * sum(each.num_prompt_tokens for each in running) + ended.prompt_tokens - prompt_tokens)
    prompts += sum(count * classes[key].prompt_tokens / classes[key].samples for key, count in waiting.items())
    works = []
    for outlook in range(3):
        survivals = {key: each[outlook] for key, each in outlooks.items()}
        work = _play(classes, survivals, running, waiting, num_running=num_running, slots=slots)
        works.append(work._replace(prompt_tokens=prompts * uncached_share))
    return Range(*works)


def _outlooks(
    classes: Mapping[LengthClass, ClassTotals],
    ended: AnswerLengths,
    running: Sequence[RunningSample],
    weight: float,
) -> dict[LengthClass, Range[Survival]]:
    """Estimate the lengths of each class. Each of the `running` stands for `weight` samples."""
    ages: defaultdict[LengthClass, Counter[int]] = defaultdict(Counter)
    for sample in running:
        ages[sample.length_class][bin_of(sample.length)] += 1
    result: dict[LengthClass, Range[Survival]] = {}
    for is_asked in (True, False):
        known = {
            key: Known(
                most=totals.max_tokens / totals.samples,
                prompt=totals.prompt_tokens / totals.samples,
                stopped=ended.classes[key].stopped,
                cut=ended.classes[key].cut,
                running={number: weight * count for number, count in ages[key].items()},
            )
            for key, totals in classes.items()
            if (2 * totals.asked_samples >= totals.samples) == is_asked
        }
        if known:
            belief = Belief([*known.values()], is_asked=is_asked)
            result.update((key, belief.outlooks(each)) for key, each in known.items())
    return result


def _play(
    classes: Mapping[LengthClass, ClassTotals],
    survivals: Mapping[LengthClass, Survival],
    running: Sequence[RunningSample],
    waiting: Mapping[LengthClass, float],
    *,
    num_running: int,
    slots: float,
) -> Work:
    """Simulate the rest of the run and return its work without prompts. `waiting` counts samples by class."""
    scale = max(1.0, slots / _MAX_SLOTS)
    going = _running_samples(running, survivals)
    tokens, keys = _totals(going, num_running)
    num_waiting = sum(waiting.values())
    num_slots = max(1, round(max(slots, num_running) / scale))
    share = min(1.0, _MAX_ROUNDS * num_slots / max(1e-9, num_waiting / scale)) / scale
    coming: list[float] = []
    for key in sorted(waiting, reverse=True):  # as the planner does it
        totals = classes[key]
        prompt = totals.prompt_tokens / totals.samples
        most = totals.max_tokens / totals.samples
        count = math.ceil(waiting[key] * share - 1e-9)
        lengths = [max(1.0, survivals[key].length(each, age=0, most=most)) for each in _quantiles(count)]
        coming += lengths
        more_tokens, more_keys = _totals([_Sample(length, prompt) for length in lengths], waiting[key])
        tokens += more_tokens
        keys += more_keys
    before = max(0.0, num_waiting / scale - len(coming)) / num_slots * sum(coming) / max(1, len(coming))
    rests = sorted((each.rest for each in going), reverse=True)
    most_going = min(len(rests), max(1, round(num_running / scale)))
    ends = [rests[number * len(rests) // most_going] for number in range(most_going)]
    return Work(steps=before + _makespan(ends, coming, max(num_slots, len(ends))), tokens=tokens, keys=keys)


def _running_samples(running: Sequence[RunningSample], survivals: Mapping[LengthClass, Survival]) -> list[_Sample]:
    """Return the remaining work of the running samples."""
    result = []
    for sample, quantile in zip(running, _quantiles(len(running)), strict=True):
        survival = survivals.get(sample.length_class)
        end = survival.length(quantile, age=sample.length, most=sample.max_tokens) if survival else sample.max_tokens
        result.append(_Sample(max(1.0, end - sample.length), sample.num_prompt_tokens + sample.length))
    return result


def _totals(samples: Sequence[_Sample], count: float) -> tuple[float, float]:
    """Return the tokens of `count` samples like these, and the keys that they attend to."""
    each = count / max(1, len(samples))
    tokens = sum(sample.rest for sample in samples)
    keys = sum(sample.rest * (sample.context + sample.rest / 2) for sample in samples)
    return tokens * each, keys * each


def _quantiles(count: int) -> Iterator[float]:
    """Yield the middles of `count` equal parts of 0 to 1, neighbours far apart."""
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) > 1:
        step += 1
    return ((number * step % count + 0.5) / count for number in range(count))


def _makespan(going: Sequence[float], coming: Sequence[float], slots: int) -> float:
    """Return when the last slot ends, if each free slot takes the next sample of `coming`."""
    ends = [*going, *([0.0] * (slots - len(going)))]
    heapq.heapify(ends)
    for length in coming:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)
