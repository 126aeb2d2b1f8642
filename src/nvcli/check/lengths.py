"""The lengths of prompts: mean, median and 95th percentile, exact, and a histogram with few buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

_NUM_BUCKETS = 10
_WIDE_RANGE = 20
"""Lengths that differ more than so many times are counted in buckets that double, others in equal ones."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of `first` to `last` tokens."""

    first: int
    last: int
    count: int


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of prompts in tokens."""

    count: int
    total: int
    least: int
    median: int
    mean: float
    p95: int
    most: int
    histogram: list[Bucket]


def lengths_of(counts: Counter[int]) -> Lengths | None:
    """Sum up prompts, given as their number by length; None where there are none."""
    if not counts:
        return None
    count, total = counts.total(), sum(length * number for length, number in counts.items())
    ordered = sorted(counts)
    return Lengths(
        count=count,
        total=total,
        least=ordered[0],
        median=_percentile(counts, ordered, count // 2),
        mean=total / count,
        p95=_percentile(counts, ordered, count * 95 // 100),
        most=ordered[-1],
        histogram=list(_histogram(counts, ordered[0], ordered[-1])),
    )


def _percentile(counts: Counter[int], ordered: list[int], rank: int) -> int:
    """Return the length with so many shorter ones before it. `ordered` are the lengths, ascending."""
    for length in ordered:
        rank -= counts[length]
        if rank < 0:
            return length
    return ordered[-1]


def _histogram(counts: Counter[int], least: int, most: int) -> Iterator[Bucket]:
    """Count lengths in buckets from the least to the most; the first and the last are never empty."""
    width = max(1, -(-(most - least + 1) // _NUM_BUCKETS))
    doubles = most > _WIDE_RANGE * least
    first, edge = least, 1 << least.bit_length()
    if doubles:  # those below the largest `_NUM_BUCKETS` are one bucket
        edge = max(edge, 1 << max(0, most.bit_length() - _NUM_BUCKETS + 1))
    while first <= most:
        last = min(most, edge - 1 if doubles else first + width - 1)
        count = sum(number for length, number in counts.items() if first <= length <= last)
        yield Bucket(first=first, last=last, count=count)
        first, edge = last + 1, 2 * edge
