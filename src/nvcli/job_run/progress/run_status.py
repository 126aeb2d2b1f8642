"""How a run stands: the figures that progress shows, taken together at one moment.

The work that is left is estimated in tokens (`progress.forecast`), from what is known of the rows that were read and
from the bytes of the input that were not. How long a token takes is that of the last minute: the time that samples have
run, by the tokens that they came to. Rates are those of the last minute too.
"""

from __future__ import annotations

import datetime
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from nvcli.errors import NvcliError
from nvcli.job_run.counts import Counts
from nvcli.job_run.feeder import Feeder
from nvcli.job_run.progress.forecast import Forecast, RunningSample, forecast, work_done
from nvcli.jobs.input.reader import RowReader
from nvcli.messages import unpack

State = Literal["starting", "running", "done", "failed", "interrupted"]
"""starting: no row was given to a replica yet; done: every row has its line, which may be an error."""

RATE_SECONDS = 60.0
END_RATE_SECONDS = 10.0
"""The time over which the speed of a token is taken once nothing waits any more: fewer samples run, and faster."""
_SNAPSHOT_SECONDS = 1.0
_PEAK_SNAPSHOTS = 5
"""Samples that end are replaced a step later, so what runs at one moment may be few; of so many moments one is not."""


class RowFigures(msgspec.Struct, frozen=True, kw_only=True):
    total: int | None = None
    """Rows of the input; None: it is not read to its end yet."""
    done: int = 0
    """Rows that this run finished; failed and deduplicated ones are included."""
    failed: int = 0
    left: int | None = None
    resumed: int = 0
    """Rows that an earlier run answered."""
    deduplicated: int = 0
    """Rows that got the answer of an equal row."""
    errors: dict[str, int] = {}
    """Failed rows by error type."""


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of rows that are done and of running ones, as far as the replicas have told."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were found in the prefix cache."""
    generated: int = 0


class RateFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the last minute."""

    rows_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run. `--progress-file` holds it as JSON."""

    state: State
    output: str | None = None
    """The output's name; None: the run has not come so far."""
    pid: int
    started_at: str
    """When the run began, in ISO 8601 and UTC; `updated_at` likewise."""
    updated_at: str
    elapsed_seconds: float = 0.0
    rows: RowFigures = RowFigures()
    tokens: TokenFigures = TokenFigures()
    rates: RateFigures = RateFigures()
    share_done: float | None = None
    """The share of the work, in tokens, that is done, from 0 to 1; None where it cannot be told yet."""
    eta_seconds: float | None = None
    """The time that is left; None where it cannot be told yet."""
    eta_is_least: bool = False
    """Whether the time left may well be longer: it depends on answers that are longer than all that have ended."""
    kv_use: float = 0.0
    """The share of the KV cache's blocks that running requests hold."""
    prefix_hit_rate: float = 0.0
    """The share of the prompt tokens that were found in the prefix cache."""
    running: int = 0
    waiting: int = 0
    """Requests in the replicas that do not run yet, and rows that were read ahead."""
    message: str | None = None
    """The error that ended the run, where `state` is `failed`."""


def bare_status(state: State, started: datetime.datetime, message: str | None = None) -> RunStatus:
    """Return the status of a run that has no figures yet."""
    now = datetime.datetime.now(datetime.UTC)
    return RunStatus(
        state=state, pid=os.getpid(), started_at=iso_time(started), updated_at=iso_time(now), message=message
    )


def how_it_ended(error: BaseException | None) -> tuple[State, str | None]:
    """Return the state of a run that `error` ended (None: it came to its end), and the message of a failure."""
    if error is None:
        return "done", None
    if not isinstance(error, Exception):
        return "interrupted", None
    message = str(error) if isinstance(error, NvcliError) else repr(error)
    return "failed", message.encode(errors="backslashreplace").decode()  # it may name a file whose name is no text


class _Snapshot(NamedTuple):
    at: float
    work: float
    running_seconds: float
    """The time that samples have run, summed over the samples."""
    num_running: int
    rows: int
    prompt_tokens: int
    generated_tokens: int


class RunView:
    """Reads a run's figures from its parts. The parts go on in other threads, so figures may be a moment apart."""

    def __init__(
        self,
        counts: Counts,
        reader: RowReader,
        feeder: Feeder,
        *,
        limit: int | None,
        started_at: float,
        output: str = "-",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started_at` is when the run began, by `clock`."""
        self._counts = counts
        self._reader = reader
        self._feeder = feeder
        self._limit = limit
        self._started_at = started_at
        self._output = output
        self._clock = clock
        self._started = datetime.datetime.now(datetime.UTC)
        self._snapshots: deque[_Snapshot] = deque()
        self._last: _Snapshot | None = None
        self._forecast_at = -_SNAPSHOT_SECONDS
        self._forecast: Forecast | None = None
        self._queue_empty_at: float | None = None

    def status(self, state: State | None = None, message: str | None = None) -> RunStatus:
        """Return how the run stands. `state` says how it ended; None: it goes on."""
        counts = self._counts
        now = self._clock()
        first, last = self._take_snapshot(now)
        seconds = max(1e-3, last.at - first.at)
        left = self._work_left(now, slots=(last.running_seconds - first.running_seconds) / seconds)
        share_done = last.work / (last.work + left.work) if left is not None and last.work else None
        eta = self._seconds_left(left, last) if left is not None else None
        if state == "done":
            share_done, eta = 1.0, 0.0
        total = self._reader.rows_of_shard if self._feeder.all_read else None
        return RunStatus(
            state=state or ("starting" if counts.started_at is None else "running"),
            output=self._output,
            pid=os.getpid(),
            started_at=iso_time(self._started),
            updated_at=iso_time(datetime.datetime.now(datetime.UTC)),
            elapsed_seconds=round(now - self._started_at, 3),
            rows=RowFigures(
                total=total,
                done=counts.rows_done,
                failed=counts.rows_failed,
                left=None if total is None else max(0, total - counts.rows_done - counts.rows_resumed),
                resumed=counts.rows_resumed,
                deduplicated=counts.rows_deduplicated,
                errors=dict(counts.errors),
            ),
            tokens=TokenFigures(
                prompt=last.prompt_tokens, cached=counts.engine_cached_tokens, generated=last.generated_tokens
            ),
            rates=RateFigures(
                rows_per_second=round((last.rows - first.rows) / seconds, 3),
                prompt_tokens_per_second=round((last.prompt_tokens - first.prompt_tokens) / seconds, 3),
                generated_tokens_per_second=round((last.generated_tokens - first.generated_tokens) / seconds, 3),
            ),
            share_done=share_done,
            eta_seconds=eta,
            eta_is_least=bool(eta) and left is not None and left.is_least,
            kv_use=counts.kv_use,
            prefix_hit_rate=counts.prefix_hit_rate,
            running=counts.num_running,
            waiting=counts.num_waiting,
            message=message,
        )

    def _take_snapshot(self, now: float) -> tuple[_Snapshot, _Snapshot]:
        """Return the oldest figures of the last minute, or those at the first request, and the present ones."""
        counts = self._counts
        since = 0.0
        if counts.started_at is not None:
            since = now - (self._last.at if self._last is not None else counts.started_at)
        running_seconds = self._last.running_seconds if self._last is not None else 0.0
        running_seconds += since * self._num_running()
        present = _Snapshot(
            at=now,
            work=work_done(counts.engine_prompt_tokens - counts.engine_cached_tokens, counts.generated_tokens),
            running_seconds=running_seconds,
            num_running=counts.num_running,
            rows=counts.rows_done,
            prompt_tokens=counts.engine_prompt_tokens,
            generated_tokens=counts.generated_tokens,
        )
        snapshots = self._snapshots
        if not snapshots and counts.started_at is not None:
            snapshots.append(_Snapshot(counts.started_at, 0.0, 0.0, 0, 0, 0, 0))
        if snapshots and now - snapshots[-1].at >= _SNAPSHOT_SECONDS:
            snapshots.append(present)
        while len(snapshots) > 1 and snapshots[1].at <= now - RATE_SECONDS:
            snapshots.popleft()
        if counts.started_at is not None:
            self._last = present
        return snapshots[0] if snapshots else present, present

    def _work_left(self, now: float, *, slots: float) -> Forecast | None:
        """Return the work that is left, at most a second old. `slots` is how many samples have run at a time."""
        if now - self._forecast_at < _SNAPSHOT_SECONDS and self._forecast is not None:
            return self._forecast
        self._forecast_at = now
        share_read = self._share_read()
        counts = self._counts
        if counts.num_waiting or share_read != 1.0:
            self._queue_empty_at = None
        elif self._queue_empty_at is None:
            self._queue_empty_at = now
        if not share_read:
            self._forecast = None
            return None
        running = []
        for stats in counts.replicas:
            if stats.num_running:
                numbers = unpack(stats.running_lengths)
                running += list(map(RunningSample, numbers[::2], numbers[1::2]))
        self._forecast = forecast(
            self._feeder.read,
            counts.lengths,
            running,
            num_running=counts.num_running if running else 0,
            slots=max(slots, self._num_running(), 1),
            share_read=share_read,
            computed_share=counts.computed_share,
            uncached_share=1 - counts.prefix_hit_rate,
        )
        return self._forecast

    def _num_running(self) -> int:
        """Return how many samples run at a time: those of this moment, or more where others are to take free slots."""
        counts = self._counts
        running = counts.num_running
        if counts.num_waiting:
            latest = list(self._snapshots)[-_PEAK_SNAPSHOTS:]
            running = max(running, *(each.num_running for each in latest), 0)
        return running

    def _seconds_left(self, left: Forecast, last: _Snapshot) -> float | None:
        """Return the time for the work that is left, at the present speed of one sample."""
        oldest = last.at - RATE_SECONDS
        if self._queue_empty_at is not None:
            oldest = max(oldest, min(last.at - END_RATE_SECONDS, self._queue_empty_at))
        first = next((each for each in self._snapshots if each.at >= oldest), None)
        if first is None or last.work <= first.work:
            return None
        return left.longest * (last.running_seconds - first.running_seconds) / (last.work - first.work)

    def _share_read(self) -> float | None:
        """Return the share of this run's rows that was read; None where the input's size is not known."""
        reader = self._reader
        if self._feeder.all_read:
            return 1.0
        share = self._share_of_input()
        if not share:
            return None
        # An earlier run answers the first rows of an input, so few of the rows that are not read yet are answered.
        rows_read = reader.rows_of_shard - reader.rows_passed_over
        rows_to_read = reader.rows_of_shard / share - self._counts.rows_resumed
        return rows_read / max(rows_read, rows_to_read, 1)

    def _share_of_input(self) -> float | None:
        """Return the share of the input that was read; None where its size is not known."""
        reader = self._reader
        shares = []
        if reader.bytes_total:
            shares.append(reader.bytes_read / reader.bytes_total)
        if self._limit is not None:
            shares.append(reader.rows_read / self._limit)
        return min(1.0, max(shares)) if shares else None


def iso_time(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
