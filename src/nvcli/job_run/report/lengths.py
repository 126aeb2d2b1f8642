"""Lengths of prompts and answers as a report shows them: a histogram, and a few figures.

Lengths come counted in bins (`answer_lengths.bin_of`): exact below 32 tokens, within 1/16 above.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.job_run.answer_lengths import bin_middle, bin_start

MAX_BARS = 32


class LengthBar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar of a histogram: lengths from `start` up to, and not including, `stop`."""

    start: int
    stop: int
    count: int
    """All lengths in the bar, cut ones included."""
    cut: int = 0
    """Answers among them that ended because they may not be longer."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of the prompts, or of the answers, in tokens. Percentiles are within 1/16 of the true values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    bars: list[LengthBar]
    """The histogram, from the shortest length to the longest, without gaps. Bars get wider with the length."""


def describe_lengths(lengths: Counter[int], *, cut: Counter[int] | None = None, total: int | None = None) -> Lengths:
    """Describe lengths that are counted by bin. `cut` counts those among them that were cut.

    `total` is the sum of all lengths where it is known; None: it is worked out from the bins.
    """
    count = lengths.total()
    if not count:
        return Lengths(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, longest=0.0, bars=[])
    bins = sorted(lengths)
    if total is None:
        total = round(sum(bin_middle(number) * lengths[number] for number in bins))
    return Lengths(
        count=count,
        mean=round(total / count, 1),
        p50=_percentile(lengths, bins, 0.5),
        p90=_percentile(lengths, bins, 0.9),
        p99=_percentile(lengths, bins, 0.99),
        longest=bin_middle(bins[-1]),
        bars=_bars(lengths, cut or Counter(), bins[0], bins[-1]),
    )


def _percentile(lengths: Counter[int], bins: list[int], share: float) -> float:
    seen = 0
    for number in bins:
        seen += lengths[number]
        if seen >= share * lengths.total():
            return bin_middle(number)
    return bin_middle(bins[-1])


def _bars(lengths: Counter[int], cut: Counter[int], first: int, last: int) -> list[LengthBar]:
    """Join so many neighbouring bins (1, 2, 4, …) in each bar that there are at most `MAX_BARS`."""
    width = 1
    while last // width - first // width >= MAX_BARS:
        width *= 2
    return [
        LengthBar(
            start=bin_start(at * width),
            stop=bin_start((at + 1) * width),
            count=sum(lengths[number] for number in range(at * width, (at + 1) * width)),
            cut=sum(cut[number] for number in range(at * width, (at + 1) * width)),
        )
        for at in range(first // width, last // width + 1)
    ]
