"""Prompt lengths: exact mean, median and 95th percentile, and a histogram with few buckets."""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.core.histogram import Bucket, histogram

_NUM_BUCKETS = 10


class PromptLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt lengths in tokens."""

    count: int
    total: int
    least: int
    median: int
    mean: float
    p95: int
    most: int
    histogram: list[Bucket]


def lengths_of(counts: Counter[int]) -> PromptLengths | None:
    """Summarise prompts, given as length → number of prompts; None if there are none."""
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
    """Return the length at a rank. `ordered` are the lengths, ascending."""
    for length in ordered:
        rank -= counts[length]
        if rank < 0:
            return length
    return ordered[-1]
