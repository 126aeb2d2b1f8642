"""The data of a report. docs/commands.md documents its JSON form.

Lengths come counted in bins (`counts.bin_of`): exact below 32 tokens, within 1/16 above.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.job.progress.run_status import State
from nvcli.job.report.timeline import TimePoint
from nvcli.job.run.counts import Example, bin_middle, bin_start
from nvcli.job.run.settings import Setting

FORMAT = 1
"""Version of the JSON form. It grows when a key is removed or changes its meaning."""


class OutputRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of the whole output, with those of earlier runs."""

    rows: int
    """Answered and failed rows. After an interrupted run with `order: input`, this includes computed rows that were
    still waiting for their turn."""
    answered: int
    failed: int
    errors: dict[str, int]
    """Failed rows by error type."""
    num_bytes: int | None
    """Size of the output file; None if it is not a regular file."""


class RunRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of this run."""

    done: int
    """Rows that the run finished; failed and deduplicated ones are included."""
    failed: int
    deduplicated: int
    """Rows answered with the answer of an equal row."""
    resumed: int
    """Rows that earlier runs had finished, not included in `done`."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of the rows that this run computed."""

    prompt: int
    cached: int
    """Prompt tokens found in the prefix cache."""
    generated: int
    deduplicated: int
    """Prompt and answer tokens of deduplicated rows, which were not computed."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the time from the first request to the last answer."""

    generated_tokens_per_second: float
    prompt_tokens_per_second: float
    rows_per_second: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One finish reason, or one type of error, in this run."""

    kind: str
    count: int
    """Answers with this finish reason, or rows with this error."""
    examples: list[Example]
    """The first of them to finish, at most three."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that computed, and what they took."""

    device: str
    dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    gpus: list[str]
    """Name of each GPU that the run held; empty on a CPU, or if nvidia-smi does not tell."""
    why: str
    """Why there are so many replicas on so many GPUs; empty if there was no choice."""
    attention_backend: str | None
    """This key and the next four are None or empty if no replica became ready."""
    kv_cache_tokens: int | None
    """Capacity of one replica's KV cache, in tokens."""
    kv_cache_bytes: int | None
    """Bytes of one rank's KV cache."""
    weight_bytes: int | None
    """Bytes of one rank's weights."""
    startup_seconds: dict[str, float]
    """Start-up times of the slowest replica, by part."""
    preemptions: int
    """Number of preemptions because the KV cache was full."""
    lost_replicas: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run."""

    format: int = FORMAT
    state: State
    """`done`, `failed` or `interrupted`."""
    message: str | None
    """The error that ended the run, where `state` is `failed`."""
    command: str
    model: str
    inputs: list[str]
    output: str
    started_at: str
    """When the run began, in ISO 8601 and UTC; `ended_at` likewise."""
    ended_at: str
    seconds: float
    """Time from the command to its end."""
    generating_seconds: float
    """Time from the first request to the last answer."""
    gpu_hours: float | None
    """GPUs times hours; None on a CPU."""
    was_complete: bool
    """Whether the output was already complete, so that this run had nothing to do."""
    whole_output: OutputRows
    rows: RunRows
    tokens: Tokens
    rates: Rates
    finish_reasons: list[Outcome]
    errors: list[Outcome]
    prompt_lengths: Lengths
    """Prompts of the rows that this run answered."""
    answer_lengths: Lengths
    """Answers that this run computed."""
    timeline: list[TimePoint]
    sampling: list[Setting]
    """Sampling of a row without its own."""
    own_sampling: dict[str, int]
    """Number of rows with another value, by sampling parameter."""
    config: list[Setting]
    engine: Engine | None
    """None if nothing was started."""
    versions: dict[str, str | None]
    warnings: list[str]


MAX_BARS = 32


class LengthBar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar of a histogram: lengths from `start` up to but not including `stop`."""

    start: int
    stop: int
    count: int
    """All lengths in the bar, including cut ones."""
    cut: int = 0
    """Answers among them that were cut at their limit."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of prompts or answers in tokens. Percentiles are within 1/16 of the true values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    bars: list[LengthBar]
    """Histogram from the shortest length to the longest, without gaps. Bars get wider with the length."""


def describe_lengths(lengths: Counter[int], *, cut: Counter[int] | None = None, total: int | None = None) -> Lengths:
    """Describe lengths that are counted by bin. `cut` counts those that were cut.

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
    """Join 1, 2, 4, … neighbouring bins in each bar, so that there are at most `MAX_BARS`."""
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
