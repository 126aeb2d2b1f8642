"""Figures of a run over time, in bounded memory.

A sample is taken every half second, and several samples make a point. When there are too many points, each two
neighbours become one, and from then on a point is made of twice as many samples. So a run of any length has between
half of the most points and all of them, evenly spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from nvcli.job.run.counts import Counts

MAX_POINTS = 600
SAMPLE_SECONDS = 0.5


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


class Timeline:
    """The time points of a run. The parent's loop takes the samples."""

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
    size = -(-len(points) // most) or 1
    return [_merged(points[at : at + size]) for at in range(0, len(points), size)]


def _merged(points: list[TimePoint]) -> TimePoint:
    """Merge neighbours into one point."""
    means = {name: sum(getattr(point, name) for point in points) / len(points) for name in _MEANS}
    return msgspec.structs.replace(points[-1], **means)


_MEANS = ("kv_use", "running", "waiting")
