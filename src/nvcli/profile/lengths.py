"""The lengths of a file's requests, from which follows what they take of the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nvcli.histogram import Bucket, histogram

_NUM_BUCKETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLengths:
    """The lengths of the requests that a file makes, in tokens. Totals are prompt and answer together."""

    requests: int
    failed_rows: int
    """Rows that would be answered with an error."""
    mean_prompt: float
    longest_prompt: int
    mean_total: float
    longest_total: int
    mean_blocks: float
    """The mean number of KV blocks that a request holds at its end."""
    histogram: list[Bucket]


def lengths_of(requests: Iterable[tuple[int, int]], *, failed_rows: int, block_size: int) -> FileLengths:
    """Sum up at least one request. `requests` are pairs of prompt tokens and most answer tokens."""
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
        mean_blocks=sum(-(-total // block_size) for total in totals) / len(pairs),
        histogram=histogram(Counter(totals), _NUM_BUCKETS),
    )
