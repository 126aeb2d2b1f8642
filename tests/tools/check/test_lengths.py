"""The lengths of prompts: figures of the whole, and a histogram that leaves nobody out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nvcli.tools.check.lengths import lengths_of


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 100_000)), min_size=1, max_size=60))
def test_figures_and_buckets(values: list[int]) -> None:
    lengths = lengths_of(Counter(values))
    assert lengths is not None
    ordered = sorted(values)
    assert (lengths.count, lengths.total) == (len(values), sum(values))
    assert (lengths.least, lengths.most) == (ordered[0], ordered[-1])
    assert lengths.median == ordered[len(values) // 2]
    assert lengths.p95 == ordered[len(values) * 95 // 100]
    buckets = lengths.histogram
    assert (buckets[0].first, buckets[-1].last, len(buckets) <= 11) == (ordered[0], ordered[-1], True)
    assert [after.first for after in buckets[1:]] == [before.last + 1 for before in buckets[:-1]]
    for bucket in buckets:
        assert bucket.count == sum(bucket.first <= value <= bucket.last for value in values)


def test_no_prompt_has_no_lengths() -> None:
    assert lengths_of(Counter()) is None
