"""The parent's loop: rows from the feeder through the plan to the engines, their outputs to the writer.

Keeps each engine supplied with about twice the requests that it can run, so that it never waits for the parent, and
with little more, so that engines take rows as they get on with them and the plan can still change. An engine that dies
ends the run, or its unfinished rows go back to the plan: an answer does not depend on who computes it. Knows no files
and no flags.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Protocol

import msgspec

from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.errors import CapacityError, NvcliError, RowError, WorkerError, reworded
from nvcli.job_run.counts import Counts
from nvcli.job_run.feeder import Feeder
from nvcli.job_run.open_rows import OpenRow, results_of
from nvcli.job_run.planning.duplicates import Duplicates
from nvcli.job_run.planning.planner import Planner
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.jobs.job import JobResult
from nvcli.jobs.output.writer import ResultWriter
from nvcli.messages import EngineReady

LONG_WAIT = 0.1
"""Seconds that the loop sleeps at most; bounds how late a signal or a dead engine is noticed."""
SHORT_WAIT = 0.01
"""The same while engines have room and rows are still being tokenized."""

MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""Of rows that one engine holds, what they pass through included; a row that is larger goes alone."""


class Engine(Protocol):
    """What the loop needs of an engine replica; `engine.client.EngineClient` is the real one."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady | None: ...
    def add(self, requests: list[Request]) -> None: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...
    def poll(self, timeout: float) -> list[RequestOutput]: ...
    def take_notes(self) -> list[str]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    @property
    def stats(self) -> EngineStats: ...


_DEATHS = (WorkerError, CapacityError)
"""What an engine ends with that the others need not share."""


class _Lane:
    """One engine and what it has been given."""

    def __init__(self, number: int, engine: Engine, capacity: int) -> None:
        self.number = number
        self.engine = engine
        self.capacity = capacity
        """Requests to keep it supplied with."""
        self.ready: EngineReady | None = None
        self.rows: dict[int, OpenRow] = {}
        """By id of each request whose answer is not complete."""
        self.num_bytes = 0
        """Of those rows."""

    @property
    def room(self) -> int:
        """Requests that it should be given; not above 0: none."""
        return self.capacity - len(self.rows) if self.num_bytes < MAX_BYTES_IN_FLIGHT else 0

    def finish(self, row: OpenRow, request_id: int) -> None:
        """A request of a row needs no more of the engine."""
        del self.rows[request_id]
        row.num_open -= 1
        if row.num_open == 0:
            self.num_bytes -= row.prepared.num_bytes


class Pipeline:
    """One run over one stream of rows."""

    def __init__(
        self,
        engines: Sequence[Engine],
        feeder: Feeder,
        planner: Planner,
        duplicates: Duplicates | None,
        writer: ResultWriter,
        counts: Counts,
        *,
        seed: int,
        max_num_seqs: int,
        keep_going: bool = False,
        on_ready: Callable[[EngineReady], None] = lambda ready: None,
        on_lost: Callable[[int, NvcliError, int], None] = lambda number, error, num_rows: None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        """`duplicates`: None: every row is computed. `counts` is kept up to date for whoever shows progress;
        `on_ready` is called once for each engine, `on_note` with what an engine has for the log. `keep_going`: while
        one engine is left, another's death does not end the run; `on_lost` is then told its number, why, and how many
        rows the others get.
        """
        self._lanes = [_Lane(number, engine, 2 * max_num_seqs) for number, engine in enumerate(engines)]
        self._feeder = feeder
        self._planner = planner
        self._duplicates = duplicates
        self._writer = writer
        self._counts = counts
        self._seed = seed
        self._keep_going = keep_going
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._num_engines = len(self._lanes)
        self._stats_of_lost: list[EngineStats] = []
        self._on_note = on_note
        self._next_request_id = 0

    def run(self, each_round: Callable[[], None] = lambda: None) -> None:
        """Until every row is answered and handed to the writer.

        `each_round` is called at least ten times a second and may raise to end the run. Raises what the engines, the
        reader or the tokenizer raise; rows that were answered before are with the writer by then.
        """
        while True:
            each_round()
            with self._timed("planning and sending rows"):
                self._take_rows()
                self._feed()
            if self._feeder.ended and not self._planner.num_rows and not any(lane.rows for lane in self._lanes):
                break
            self._collect()
            with self._timed("writing"):
                self._writer.tick()
        self._feeder.raise_error()

    def _take_rows(self) -> None:
        """Move rows from the feeder into the window of the plan, and results of rows that failed to the writer."""
        while not self._planner.is_full and not (self._duplicates is not None and self._duplicates.is_full):
            batch = self._feeder.take(timeout=0)
            if batch is None:
                return
            failed: list[tuple[PreparedRow | None, JobResult]] = []
            for row in batch:
                if isinstance(row, JobResult):
                    failed.append((None, row))
                elif self._duplicates is None or self._duplicates.admit(row):
                    self._planner.add(row)
            self._finish(failed)
            self._finish_duplicates()

    def _feed(self) -> None:
        """Give rows to the engines that have most room. All samples of a row go to one engine."""
        lanes = {lane.number: lane for lane in self._lanes if lane.ready is not None}
        room = {number: lane.room for number, lane in lanes.items()}
        given: dict[int, list[Request]] = {}
        while room and self._planner.num_rows:
            number = max(room, key=room.__getitem__)
            if room[number] <= 0:
                break
            lane = lanes[number]
            prepared = self._planner.take(number)
            assert prepared is not None
            lane.num_bytes += prepared.num_bytes
            row = OpenRow(prepared, self._next_request_id)
            self._next_request_id += len(row.samples)
            for request_id in row.request_ids:
                lane.rows[request_id] = row
            room[number] = lane.room
            given.setdefault(number, []).extend(row.requests(self._seed))
        for number, requests in given.items():
            self._counts.started_at = self._counts.started_at or time.monotonic()
            try:
                lanes[number].engine.add(requests)
            except _DEATHS as error:
                self._lose(lanes[number], error)

    def _collect(self) -> None:
        """Wait for engines to say something, and take it."""
        counts = self._counts
        wants_rows = not self._feeder.ended and any(lane.ready and lane.room > 0 for lane in self._lanes)
        is_starved = not self._feeder.ended and any(lane.ready and not lane.rows for lane in self._lanes)
        is_starting = not any(lane.ready for lane in self._lanes)
        wait = "start-up" if is_starting else "engines waiting for rows" if is_starved else "waiting for the engines"
        with self._timed(wait):
            connection.wait([lane.engine.fileno() for lane in self._lanes], SHORT_WAIT if wants_rows else LONG_WAIT)
        rows: list[OpenRow] = []
        deaths: list[tuple[_Lane, NvcliError]] = []
        with self._timed("taking answers"):
            for lane in self._lanes:  # those that say nothing too: it may be for ever
                try:
                    self._listen(lane, rows)
                except _DEATHS as error:
                    deaths.append((lane, error))
        if rows:
            with self._timed("detokenizing"):
                results = results_of(rows, self._feeder.tokenizer)
            self._finish([(row.prepared, result) for row, result in zip(rows, results, strict=True)])
            if self._duplicates is not None:
                for row, result in zip(rows, results, strict=True):
                    self._duplicates.finish(row.prepared, result, row.error)
                self._finish_duplicates()
        for lane, death in deaths:  # after the answers of the others are safe
            self._lose(lane, death)
        counts.engines = [*(lane.engine.stats for lane in self._lanes), *self._stats_of_lost]
        counts.num_planned = self._planner.num_rows + (self._duplicates.num_rows if self._duplicates else 0)

    def _listen(self, lane: _Lane, complete: list[OpenRow]) -> None:
        """Take what one engine says, and add the rows that are complete with it. Raises what the engine ended with."""
        if lane.ready is None:
            lane.ready = lane.engine.wait_ready(0)
            if lane.ready is not None:
                self._on_ready(lane.ready)
            return
        to_abort: list[int] = []
        outputs = lane.engine.poll(0)
        for note in lane.engine.take_notes():
            self._on_note(note)
        for output in outputs:
            request_id = output.request_id
            row = lane.rows.get(request_id)
            if row is None:
                continue  # ended by a stop string or an error of its row; the engine's last words
            sample = row.sample_of(request_id)
            if not sample.take(output, row.prepared.sampling, self._feeder.tokenizer):
                continue
            lane.finish(row, request_id)
            if output.finish_reason is None:
                to_abort.append(request_id)
            elif sample.finish_reason in ("error", "abort"):
                row.error = RowError(output.error_type or "aborted", output.error or "the engine dropped this request")
                others = [other for other in row.request_ids if other in lane.rows]
                for other in others:
                    lane.finish(row, other)
                to_abort += others
            if row.num_open == 0:
                complete.append(row)
        if to_abort:
            lane.engine.abort(to_abort)

    def _lose(self, lane: _Lane, error: NvcliError) -> None:
        """An engine is dead. Its unfinished rows go back to the plan; raises `error` where the run ends with it."""
        if self._num_engines > 1:
            error = reworded(error, f"replica {lane.number}: {error}")
        if not self._keep_going or len(self._lanes) == 1:
            raise error
        self._lanes.remove(lane)
        rows = {id(row): row.prepared for row in lane.rows.values()}.values()  # the samples of a row are one row
        for prepared in rows:
            self._planner.add(prepared)
        # What it computed was computed; nothing runs or waits in it any more.
        self._stats_of_lost.append(
            msgspec.structs.replace(lane.engine.stats, num_running=0, num_waiting=0, num_blocks=0, num_used_blocks=0)
        )
        lane.engine.close()
        self._counts.num_lost_engines += 1
        self._on_lost(lane.number, error, len(rows))

    def _finish_duplicates(self) -> None:
        if self._duplicates is not None and (ready := self._duplicates.take_ready()):
            self._finish(ready, computed=False)

    def _finish(self, results: Sequence[tuple[PreparedRow | None, JobResult]], *, computed: bool = True) -> None:
        if not results:
            return
        for prepared, result in results:
            self._counts.add(prepared, result, computed=computed)
        with self._timed("writing"):
            self._writer.write(result for _, result in results)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Count the time of a block towards `part`, without that of timed blocks inside it."""
        seconds = self._counts.seconds
        inside = sum(seconds.values())
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds[part] += time.perf_counter() - started - (sum(seconds.values()) - inside)
