"""Lengths of a file's requests, which determine their use of the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nvcli.core.histogram import Bucket, histogram
from nvcli.kernels.whole_numbers import ceil_div

_NUM_BUCKETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLengths:
    """Lengths of a file's requests in tokens. Totals are prompt and answer together."""

    requests: int
    failed_rows: int
    """Rows that would become error rows."""
    mean_prompt: float
    longest_prompt: int
    mean_total: float
    longest_total: int
    mean_blocks: float
    """Mean number of KV blocks that a request holds at its end."""
    histogram: list[Bucket]


def lengths_of(requests: Iterable[tuple[int, int]], *, failed_rows: int, block_size: int) -> FileLengths:
    """Summarise at least one request. `requests` are pairs of prompt tokens and maximum answer tokens."""
    pairs = list(requests)
    totals = [prompt + answer for prompt, answer in pairs]
    prompts = [prompt for prompt, _ in pairs]
    return FileLengths(
        requests=len(pairs),
        failed_rows=failed_rows,
        mean_prompt=sum(prompts) / len(pairs),
        longest_prompt=max(prompts),
        mean_total=sum(totals) / len(pairs),
        longest_total=max(totals),
        mean_blocks=sum(ceil_div(total, block_size) for total in totals) / len(pairs),
        histogram=histogram(Counter(totals), _NUM_BUCKETS),
    )
