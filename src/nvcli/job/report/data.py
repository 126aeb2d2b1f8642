"""The data of a report. docs/commands.md documents its JSON form.

Lengths come counted in bins (`counts.bin_of`): exact below 32 tokens, within 1/16 above.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from nvcli.engine.request import SpeculationFigures
from nvcli.job.progress.run_status import State
from nvcli.job.run.counts import Counts, Example, bin_middle, bin_start
from nvcli.job.run.settings import Setting
from nvcli.kernels.whole_numbers import ceil_div

FORMAT = 1
"""Version of the JSON form. It grows when a key is removed or changes its meaning."""


class TimePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a stretch of time: counts since the start of the run, and means over the stretch."""

    seconds: float
    """End of the stretch, in seconds since the start of the run."""
    rows: int
    """Rows that this run had finished by then."""
    prompt_tokens: int
    """Prompt tokens that had been computed or found in the prefix cache by then."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache by then."""
    generated_tokens: int
    kv_use: float
    """The share of the KV cache's blocks that running requests held, on average."""
    running: float
    """Requests that ran, on average."""
    waiting: float
    """Requests that waited in the replicas, and rows that were read ahead, on average."""


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
    """Why the run has this many replicas on this many GPUs; empty if there was no choice."""
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
    speculation: SpeculationFigures | None
    """Drafted tokens and those that were right; None: nothing was drafted."""
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


def describe_lengths(lengths: Counter[int], *, total: int, cut: Counter[int] | None = None) -> Lengths:
    """Describe lengths that are counted by bin and add up to `total`. `cut` counts those that were cut."""
    count = lengths.total()
    if not count:
        return Lengths(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, longest=0.0, bars=[])
    bins = sorted(lengths)
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


MAX_POINTS = 600
SAMPLE_SECONDS = 0.5


class Timeline:
    """The figures of a run over time, in bounded memory. The parent's loop takes the samples.

    Several samples make a point. When there are too many points, neighbours are merged in pairs, and from then on a
    point is made of twice as many samples. So a run of any length has between half of the most points and all of them,
    evenly spread.
    """

    def __init__(
        self,
        counts: Counts,
        *,
        started_at: float,
        clock: Callable[[], float] = time.monotonic,
        max_points: int = MAX_POINTS,
    ) -> None:
        """`started_at` is when the run began, by `clock`."""
        self._counts = counts
        self._started_at = started_at
        self._clock = clock
        self._max_points = max_points
        self._next = started_at
        self._points: list[TimePoint] = []
        self._samples_per_point = 1
        self._open: list[TimePoint] = []
        """Samples of the next point."""

    @property
    def points(self) -> list[TimePoint]:
        return [*self._points, *([_merged(self._open)] if self._open else [])]

    def sample(self, *, is_last: bool = False) -> None:
        """Take a sample if one is due. May be called as often as you like; the last call always counts."""
        now = self._clock()
        if now < self._next and not is_last:
            return
        self._next = now + SAMPLE_SECONDS
        counts = self._counts
        self._open.append(
            TimePoint(
                seconds=round(now - self._started_at, 3),
                rows=counts.rows_done,
                prompt_tokens=counts.engine_prompt_tokens,
                cached_tokens=counts.engine_cached_tokens,
                generated_tokens=counts.generated_tokens,
                kv_use=counts.kv_use,
                running=counts.num_running,
                waiting=counts.num_waiting,
            )
        )
        if len(self._open) >= self._samples_per_point:
            self._points.append(_merged(self._open))
            self._open = []
        if len(self._points) >= self._max_points:
            self._points = [_merged(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]
            self._samples_per_point *= 2


def merge_points(points: list[TimePoint], most: int) -> list[TimePoint]:
    """Merge neighbours, equally many each, so that there are at most `most` points."""
    size = ceil_div(len(points), most) or 1
    return [_merged(points[at : at + size]) for at in range(0, len(points), size)]


def _merged(points: list[TimePoint]) -> TimePoint:
    """Merge neighbours into one point."""
    means = {name: sum(getattr(point, name) for point in points) / len(points) for name in _MEANS}
    return msgspec.structs.replace(points[-1], **means)


_MEANS = ("kv_use", "running", "waiting")
