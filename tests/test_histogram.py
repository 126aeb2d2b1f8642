"""Numbers are counted in few buckets, narrow where they are small, and drawn as bars."""

from __future__ import annotations

from collections import Counter

import pytest

from nvcli.core.histogram import Bucket, histogram, histogram_lines


@pytest.mark.parametrize(
    ("values", "spans"),
    [
        ([7, 7], [(7, 7)]),
        ([1, 12], [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]),
        ([3, 500], [(3, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 127), (128, 255), (256, 500)]),
    ],
)
def test_wide_ranges_have_buckets_that_double(values: list[int], spans: list[tuple[int, int]]) -> None:
    assert [(one.first, one.last) for one in histogram(Counter(values), 10)] == spans


def test_every_bucket_that_is_not_empty_has_a_bar() -> None:
    buckets = [Bucket(first=1, last=1, count=1), Bucket(first=2, last=9, count=0), Bucket(first=10, last=17, count=999)]
    assert [line.split() for line in histogram_lines(buckets)] == [
        ["1", "1", "█"],
        ["2", "to", "9", "0"],
        ["10", "to", "17", "999", "█" * 40],
    ]
