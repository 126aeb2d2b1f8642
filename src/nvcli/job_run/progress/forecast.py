"""How much work a run has before it, and for how long: the forecast behind the time left and the percentage.

The unit of work is one generated token. A prompt token that is computed counts for a tenth of one, because prompts are
computed many tokens at a time; one that is found in the prefix cache counts nothing.

How long answers become is estimated for each class of `max_tokens` (`progress.survival`). Then the rest of the run is
played through: samples that run go on to their expected lengths, and whenever one ends, the next one takes its slot.
So the end of a run, when a few long answers are left and most slots are empty, takes its time. Rows that are not read
yet are taken to be like those that were read, byte for byte. Large runs are played through with a part of their slots.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nvcli.job_run.answer_lengths import AnswerLengths, ClassTotals, ReadTotals, bin_of, length_class
from nvcli.job_run.progress.survival import Survival

PROMPT_WEIGHT = 0.1

_MAX_SLOTS = 128
"""Runs with more slots than this are played through on a smaller scale."""
_MAX_RUNNING = 1024
"""Of more running samples only some are looked at."""
_MAX_ROUNDS = 6
"""Of the samples that wait, so many for each slot are played through; those before them keep all slots busy."""
_UNSEEN_SHARE = 0.2
"""An estimate is a lower bound where more than this share of it is in lengths that no sample has come to."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_LONE_SHARE = 0.6
"""A step of few samples takes this share of the time of one that fills all slots, and more as it fills. It is between
what is found where weights limit a step (1) and where the samples do (0); near the end it is measured."""
_OPEN = 0
"""The group of all classes whose rows name no `max_tokens`."""


class RunningSample(NamedTuple):
    """A sample that runs."""

    length: int
    """The tokens that it has."""
    max_tokens: int


class Forecast(NamedTuple):
    """The work that is left."""

    work: float
    """All work that is left, in generated tokens."""
    longest: float
    """The work that is done one after the other in the slot that ends last: the time left, in generated tokens of one
    sample."""
    is_least: bool
    """Whether it may well become more: much depends on samples that have outgrown all that have ended."""


class _Work(NamedTuple):
    """One sample's work: the whole, and the part in lengths that samples have come to before."""

    whole: float
    seen: float


def work_done(prompt_tokens: float, generated_tokens: float) -> float:
    """Return the work of so many tokens, in generated tokens."""
    return PROMPT_WEIGHT * prompt_tokens + generated_tokens


def forecast(
    read: ReadTotals,
    ended: AnswerLengths,
    running: Sequence[RunningSample],
    *,
    num_running: int,
    slots: float,
    share_read: float,
    computed_share: float = 1.0,
    uncached_share: float = 1.0,
) -> Forecast | None:
    """Estimate the work that is left; None before anything can be said.

    `running` are some of the `num_running` samples that run, evenly chosen. `slots` is how many run while others
    wait. `share_read` is the share of the rows that this run has to answer and has read, above 0 and at most 1.
    `computed_share` of the rows are computed, the others being equal to one of them; `uncached_share` of the prompt
    tokens are.
    """
    running = running[:: math.ceil(len(running) / _MAX_RUNNING) or 1]
    classes = dict(read.classes)  # the feeder's thread adds to them
    survivals = _survivals(classes, ended, running, num_running=num_running)
    if survivals is None:
        return None
    scale = max(1.0, slots / _MAX_SLOTS)
    going = _running_work(running, survivals, most=max(1, round(num_running / scale)) if num_running else 0)
    num_slots = max(1, round(slots / scale), len(going))
    work = sum(each.whole for each in going) / max(1, len(going)) * num_running
    by_class = Counter(length_class(sample.max_tokens) for sample in running)
    weight = num_running / max(1, len(running))
    waiting: dict[int, float] = {}
    for key, totals in classes.items():
        missing = totals.samples - ended.classes[key].samples - weight * by_class[key]
        waiting[key] = computed_share * (max(0.0, missing) + totals.samples * (1 / share_read - 1))
    played = min(sum(waiting.values()) / scale, float(_MAX_ROUNDS * num_slots))
    share = played / max(1e-9, sum(waiting.values()))
    coming: list[_Work] = []
    for key in sorted(waiting, reverse=True):  # as the planner does it
        totals = classes[key]
        unended = max(1, totals.samples - ended.classes[key].samples)
        prompt = (totals.prompt_tokens - ended.classes[key].prompt_tokens) / unended
        prompt = prompt * share_read + totals.prompt_tokens / totals.samples * (1 - share_read)
        samples = _waiting_work(
            math.ceil(waiting[key] * share - 1e-9),
            survivals[key],
            most=_mean_max(totals),
            prompt=PROMPT_WEIGHT * uncached_share * max(0.0, prompt),
        )
        coming += samples
        work += sum(each.whole for each in samples) / max(1, len(samples)) * waiting[key]
    before = max(0.0, sum(waiting.values()) / scale - len(coming)) / num_slots
    whole, seen = (
        _longest([each[part] for each in going], [each[part] for each in coming], num_slots, before) for part in (0, 1)
    )
    return Forecast(work, whole, seen < (1 - _UNSEEN_SHARE) * whole)


def _survivals(
    classes: Mapping[int, ClassTotals],
    ended: AnswerLengths,
    running: Sequence[RunningSample],
    *,
    num_running: int,
) -> Mapping[int, Survival] | None:
    """Estimate the lengths of each class; None where nothing has ended and nothing has come far."""
    asked = {key for key, totals in classes.items() if 2 * totals.asked_samples >= totals.samples}
    keys = {*classes, *(length_class(sample.max_tokens) for sample in running)}
    groups = {key: key if key in asked else _OPEN for key in keys}
    weight = num_running / max(1, len(running))
    stopped: defaultdict[int, Counter[int]] = defaultdict(Counter)
    cut: defaultdict[int, Counter[int]] = defaultdict(Counter)
    ages: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for key, group in groups.items():
        stopped[group].update(ended.classes[key].stopped)
        cut[group].update(ended.classes[key].cut)
    for sample in running:
        ages[groups[length_class(sample.max_tokens)]][bin_of(sample.length)] += 1

    def survival(group: int, expected: float) -> Survival:
        weighted = {number: count * weight for number, count in ages[group].items()}
        return Survival(stopped[group], cut[group], weighted, expected=expected)

    alone = {group: survival(group, 0.0) for group in set(groups.values())}
    longest = max((each.longest for each in alone.values()), default=0.0)
    if not longest:
        return None
    result = {}
    for group in alone:
        expected = 0.0 if alone[group].longest else longest
        if group != _OPEN:  # it comes to the same share of what it asks for as others did
            expected = _mean_share(classes, alone, asked - {group}) * _mean_max(classes[group]) or expected
        result[group] = survival(group, expected)
    return {key: result[group] for key, group in groups.items()}


def _mean_max(totals: ClassTotals) -> float:
    return totals.max_tokens / totals.samples


def _mean_share(classes: Mapping[int, ClassTotals], survivals: Mapping[int, Survival], keys: set[int]) -> float:
    """Return which share of their `max_tokens` samples of these classes come to; 0 where nothing is known of any."""
    known = [key for key in keys if survivals[key].longest]
    most = sum(classes[key].max_tokens for key in known)
    if not most:
        return 0.0
    length = 0.0
    for key in known:
        samples = _waiting_work(32, survivals[key], most=_mean_max(classes[key]), prompt=0.0)
        length += sum(each.whole for each in samples) / len(samples) * classes[key].samples
    return length / most


def _running_work(running: Sequence[RunningSample], survivals: Mapping[int, Survival], *, most: int) -> list[_Work]:
    """Return what at most `most` of the running samples have before them, the one that has most included."""
    result = []
    for (length, max_tokens), quantile in zip(running, _quantiles(len(running)), strict=True):
        survival = survivals[length_class(max_tokens)]
        end = survival.length(quantile, age=length, most=max_tokens)
        seen = min(end, max(length, survival.seen)) - length
        result.append(_Work(max(1.0, end - length), max(1.0, seen)))
    result.sort(reverse=True)
    return [result[number * len(result) // most] for number in range(min(most, len(result)))]


def _waiting_work(count: int, survival: Survival, *, most: float, prompt: float) -> list[_Work]:
    """Return the work of so many samples that wait, each with `prompt` work before its first token."""
    result = []
    for quantile in _quantiles(count):
        length = survival.length(quantile, age=0, most=most)
        result.append(_Work(prompt + max(1.0, length), prompt + max(1.0, min(length, survival.seen))))
    return result


def _quantiles(count: int) -> Iterator[float]:
    """Yield the middles of `count` equal parts of 0 to 1, neighbours far apart."""
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return ((number * step % count + 0.5) / count for number in range(count))


def _longest(going: Sequence[float], coming: Sequence[float], slots: int, before: float) -> float:
    """Return when the last slot ends, if each slot that ends takes the next sample of `coming`.

    `before` is how many samples like these each slot computes before them. Times are in tokens of a sample, at the
    speed at which they come while the slots that are busy now stay busy.
    """
    num_busy = min(slots, len(going) + len(coming))
    if not num_busy:
        return 0.0
    ends = [*going, *([0.0] * (slots - len(going)))]
    heapq.heapify(ends)
    for work in coming:
        heapq.heapreplace(ends, ends[0] + work)
    ends = sorted(ends)[slots - num_busy :]
    total = ends[0] + (before * sum(coming) / len(coming) if coming else 0.0)
    for number in range(1, num_busy):
        share = (num_busy - number) / num_busy
        total += (ends[number] - ends[number - 1]) * (_LONE_SHARE + (1 - _LONE_SHARE) * share)
    return total
