"""Histograms of integers, such as lengths in tokens, with a few buckets for people to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WIDE_RANGE = 20
"""Numbers that span more than this factor get buckets that double, others get equal ones."""

_BAR = 40
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The range from `first` to `last`, and the count of numbers in it."""

    first: int
    last: int
    count: int


def histogram(counts: Counter[int], num_buckets: int) -> list[Bucket]:
    """Count at least one number in about `num_buckets` buckets without gaps; at most one more where they double.

    `counts` maps each number to its frequency. The first and the last bucket are never empty.
    """
    least, most = min(counts), max(counts)
    width = max(1, -(-(most - least + 1) // num_buckets))
    doubles = most > _WIDE_RANGE * least
    first, edge = least, 1 << least.bit_length()
    if doubles:  # numbers below the `num_buckets` largest buckets share one bucket
        edge = max(edge, 1 << max(0, most.bit_length() - num_buckets + 1))
    buckets = []
    while first <= most:
        last = min(most, edge - 1 if doubles else first + width - 1)
        count = sum(number for value, number in counts.items() if first <= value <= last)
        buckets.append(Bucket(first=first, last=last, count=count))
        first, edge = last + 1, 2 * edge
    return buckets


def histogram_lines(buckets: Sequence[Bucket]) -> Iterator[str]:
    """Yield a line of text for each of at least one bucket: its range, its count, and a bar."""
    highest = max(bucket.count for bucket in buckets)
    for bucket in buckets:
        bar = "█" * max(1 if bucket.count else 0, round(_BAR * bucket.count / highest))
        span = f"{bucket.first:,}" if bucket.first == bucket.last else f"{bucket.first:,} to {bucket.last:,}"
        yield f"{span:>19} {bucket.count:>11,} {bar}".rstrip()
