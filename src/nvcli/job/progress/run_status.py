"""The state of a run: the figures that progress displays show, as of one moment.

The work that is left is estimated (`progress.forecast`) from what is known of the rows that were read and from the
bytes of the input that were not, and the time that it takes (`progress.speed`) from the work that was done. Rates are
those of the last minute.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from nvcli.core.messages import unpack
from nvcli.engine.request import SpeculationFigures
from nvcli.errors import NvcliError
from nvcli.job.input.reader import RowReader
from nvcli.job.progress.forecast import RunningSample, forecast
from nvcli.job.progress.speed import USUAL_OF_CPU, USUAL_OF_GPU, Range, Speed, Work
from nvcli.job.run.counts import Counts
from nvcli.job.run.feeder import Feeder

State = Literal["starting", "running", "done", "failed", "interrupted"]
"""starting: no replica has been given a row yet; done: every row has its line, which may be an error."""

RATE_SECONDS = 60.0
_SNAPSHOT_SECONDS = 1.0
_SPEED_SHARE = 0.1
"""Uncertainty of speeds as a share, on top of which comes `_FIRST_SPEED_SHARE` in the first second."""
_FIRST_SPEED_SHARE = 0.4
_SMOOTHING_SHARE = 0.05
"""Estimates are smoothed over this share of the time so far, but at most `_SMOOTHING_SHARE_LEFT` of the time left."""
_SMOOTHING_SHARE_LEFT = 0.05
_PEAK_SNAPSHOTS = 5
"""Snapshots to look at for the number of slots: samples that end are replaced a step later."""


class RowFigures(msgspec.Struct, frozen=True, kw_only=True):
    total: int | None = None
    """Rows of the input; None: it has not been read to its end."""
    done: int = 0
    """Rows that this run finished, including failed and deduplicated ones."""
    failed: int = 0
    left: int | None = None
    resumed: int = 0
    """Rows answered by earlier runs."""
    deduplicated: int = 0
    """Rows answered with the answer of an equal row."""
    errors: dict[str, int] = {}
    """Failed rows by error type."""


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of finished and running rows, as far as the replicas have reported."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
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
    """The output's name; None: not known yet."""
    pid: int
    started_at: str
    """When the run began, in ISO 8601 and UTC; `updated_at` likewise."""
    updated_at: str
    elapsed_seconds: float = 0.0
    rows: RowFigures = RowFigures()
    tokens: TokenFigures = TokenFigures()
    rates: RateFigures = RateFigures()
    share_done: float | None = None
    """Share of the work that is done, from 0 to 1, which never falls; None: unknown yet."""
    eta_seconds: float | None = None
    """Time left; None: unknown yet."""
    eta_low_seconds: float | None = None
    """Time left if answers turn out short; `eta_high_seconds`: if they turn out long."""
    eta_high_seconds: float | None = None
    kv_use: float = 0.0
    """Share of the KV cache's blocks that running requests hold."""
    prefix_hit_rate: float = 0.0
    """Share of prompt tokens that were found in the prefix cache."""
    speculation: SpeculationFigures | None = None
    """Drafted tokens and those that were right; None: nothing was drafted."""
    running: int = 0
    waiting: int = 0
    """Requests waiting in the replicas, and rows read ahead."""
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
    work: Work = Work()
    """All work that was done until then."""
    num_running: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class RunView:
    """Reads a run's figures from its parts, which other threads keep changing."""

    def __init__(
        self,
        counts: Counts,
        reader: RowReader,
        feeder: Feeder,
        *,
        limit: int | None,
        started_at: float,
        output: str = "-",
        on_gpu: bool = False,
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
        self._speed = Speed(USUAL_OF_GPU if on_gpu else USUAL_OF_CPU)
        self._learned = _Snapshot(started_at)
        """The figures when `_speed` learned last."""
        self._left: Range[float] | None = None
        self._share_done: float | None = None
        self._work_shown = Work()
        """The work that `_share_done` includes."""

    def status(self, state: State | None = None, message: str | None = None) -> RunStatus:
        """Return the state of the run. `state` says how it ended; None: it goes on."""
        counts = self._counts
        now = self._clock()
        first, last = self._look(now)
        seconds = max(1e-3, last.at - first.at)
        share_done, left = self._share_done, self._left
        if state == "done":
            share_done, left = 1.0, Range(0.0, 0.0, 0.0)
        total = self._reader.rows_of_shard if self._feeder.all_read else None
        return msgspec.structs.replace(
            bare_status(state or ("starting" if counts.started_at is None else "running"), self._started, message),
            output=self._output,
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
            eta_seconds=left and left.middle,
            eta_low_seconds=left and left.low,
            eta_high_seconds=left and left.high,
            kv_use=counts.kv_use,
            speculation=SpeculationFigures.of(counts.replicas),
            prefix_hit_rate=counts.prefix_hit_rate,
            running=counts.num_running,
            waiting=counts.num_waiting,
        )

    def _look(self, now: float) -> tuple[_Snapshot, _Snapshot]:
        """Return the oldest figures of the last minute (or those of the first request), and the present ones.

        What follows from them is renewed once a second.
        """
        counts = self._counts
        snapshots = self._snapshots
        if not snapshots and counts.started_at is not None:
            self._learned = _Snapshot(counts.started_at)
            snapshots.append(self._learned)
        if not snapshots:
            return _Snapshot(now), _Snapshot(now)
        last = snapshots[-1]
        running = self._running_samples()
        present = self._snapshot(now, last, running)
        if now - last.at >= _SNAPSHOT_SECONDS:
            snapshots.append(present)
            while snapshots[1].at <= now - RATE_SECONDS:
                snapshots.popleft()
            slots = self._num_slots()
            if present.work != self._learned.work:  # a long step shows when it begins or ends, and not in between
                done = present.work.minus(self._learned.work)
                self._speed.learn(done, present.at - self._learned.at, num_running=slots)
                self._learned = present
            left = self._time_left(running, slots)
            if left is not None and self._left is not None:
                left = _smoothed(left, self._left, present.at - last.at, present.at - (counts.started_at or 0.0))
            self._left = left
        self._move_bar(present.work)
        return snapshots[0], present

    def _snapshot(self, now: float, last: _Snapshot, running: Sequence[RunningSample]) -> _Snapshot:
        """Return the present figures."""
        counts = self._counts
        tokens = max(0.0, counts.sampled_tokens - last.work.tokens)
        num_running = (counts.num_running + last.num_running) / 2 if last.num_running else counts.num_running
        context = sum(each.length + each.num_prompt_tokens for each in running) / max(1, len(running))
        return _Snapshot(
            at=now,
            work=Work(
                steps=last.work.steps + tokens / max(1.0, num_running),
                tokens=last.work.tokens + tokens,
                keys=last.work.keys + tokens * context,
                prompt_tokens=max(
                    last.work.prompt_tokens, float(counts.engine_prompt_tokens - counts.engine_cached_tokens)
                ),
            ),
            num_running=counts.num_running,
            rows=counts.rows_done,
            prompt_tokens=counts.engine_prompt_tokens,
            generated_tokens=counts.generated_tokens,
        )

    def _running_samples(self) -> list[RunningSample]:
        """Return an even selection of the running samples."""
        running: list[RunningSample] = []
        for stats in self._counts.replicas:
            if stats.num_running:
                numbers = unpack(stats.running_lengths)
                running += map(RunningSample, numbers[::3], numbers[1::3], numbers[2::3])
        return running

    def _time_left(self, running: Sequence[RunningSample], slots: int) -> Range[float] | None:
        counts = self._counts
        share_read = self._share_read()
        if not share_read:
            return None
        left = forecast(
            self._feeder.read,
            counts.lengths,
            running,
            num_running=counts.num_running if running else 0,
            slots=slots,
            share_read=share_read,
            prompt_tokens=counts.engine_prompt_tokens,
            computed_share=counts.computed_share,
            uncached_share=1 - counts.prefix_hit_rate,
        )
        if left is None:
            return None
        low, middle, high = map(self._speed.seconds, left)
        if low is None or middle is None or high is None:
            return None
        if self._waits_for_rows:  # most of them are equal to others, so that little is computed
            reading = (self._clock() - (counts.started_at or 0.0)) * (1 / share_read - 1)
            low, middle, high = (max(each, reading) for each in (low, middle, high))
        unsure = _SPEED_SHARE + _FIRST_SPEED_SHARE / math.sqrt(1 + (self._clock() - (counts.started_at or 0.0)))
        return Range(min(low, middle) * (1 - unsure), middle, max(middle, high) * (1 + unsure))

    def _move_bar(self, work: Work) -> None:
        """Advance the bar by the share of the work done since, of all that was left when it last moved; where nothing
        is left to be done of the rows that were read, to their share."""
        if self._waits_for_rows and (share_read := self._share_read()):
            self._share_done = max(self._share_done or 0.0, share_read)
        done = self._speed.seconds(work.minus(self._work_shown))
        if self._left is None or not done or done < 0:
            return
        share = self._share_done or 0.0
        self._share_done = share + (1 - share) * done / max(1e-9, done + self._left.middle)
        self._work_shown = work

    @property
    def _waits_for_rows(self) -> bool:
        """Whether the replicas have nothing to do until more rows are read."""
        counts = self._counts
        return not (counts.num_running or counts.num_waiting or self._feeder.all_read)

    def _num_slots(self) -> int:
        """Return how many samples run at a time: the present number, or a recent higher one if others wait."""
        counts = self._counts
        running = counts.num_running
        if counts.num_waiting:
            latest = list(self._snapshots)[-_PEAK_SNAPSHOTS:]
            running = max(running, *(each.num_running for each in latest), 0)
        return max(1, running)

    def _share_read(self) -> float | None:
        """Return the share of this run's rows that was read; None if the input's size is unknown."""
        reader = self._reader
        if self._feeder.all_read:
            return 1.0
        shares = [reader.bytes_read / reader.bytes_total] if reader.bytes_total else []
        shares += [reader.rows_read / self._limit] if self._limit is not None else []
        share = min(1.0, max(shares, default=0.0))
        if not share:
            return None
        # An earlier run answers the first rows of an input, so few of the rows that are not read yet are answered.
        rows_read = reader.rows_of_shard - reader.rows_passed_over
        rows_to_read = reader.rows_of_shard / share - self._counts.rows_resumed
        return rows_read / max(rows_read, rows_to_read, 1)


def _smoothed(left: Range[float], before: Range[float], seconds: float, elapsed: float) -> Range[float]:
    """Return the seconds that are left, smoothed with the estimate made `seconds` before: the mean of about the
    last twentieth of the time."""
    share = math.exp(-seconds / max(1e-9, min(_SMOOTHING_SHARE * elapsed, _SMOOTHING_SHARE_LEFT * left.middle)))
    return Range(*(share * max(0.0, old - seconds) + (1 - share) * new for old, new in zip(before, left, strict=True)))


def iso_time(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
