"""The lengths of prompts: mean, median and 95th percentile, exact, and a histogram with few buckets."""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.histogram import Bucket, histogram

_NUM_BUCKETS = 10


class PromptLengths(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of prompts in tokens."""

    count: int
    total: int
    least: int
    median: int
    mean: float
    p95: int
    most: int
    histogram: list[Bucket]


def lengths_of(counts: Counter[int]) -> PromptLengths | None:
    """Sum up prompts, given as their number by length; None where there are none."""
    if not counts:
        return None
    count, total = counts.total(), sum(length * number for length, number in counts.items())
    ordered = sorted(counts)
    return PromptLengths(
        count=count,
        total=total,
        least=ordered[0],
        median=_percentile(counts, ordered, count // 2),
        mean=total / count,
        p95=_percentile(counts, ordered, count * 95 // 100),
        most=ordered[-1],
        histogram=histogram(counts, _NUM_BUCKETS),
    )


def _percentile(counts: Counter[int], ordered: list[int], rank: int) -> int:
    """Return the length with so many shorter ones before it. `ordered` are the lengths, ascending."""
    for length in ordered:
        rank -= counts[length]
        if rank < 0:
            return length
    return ordered[-1]
