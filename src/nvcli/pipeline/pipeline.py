"""The parent's loop: rows from the feeder to the engines, their outputs to the writer.

Keeps each engine supplied with about twice the requests that it can run, so that it never waits for the parent, and
with little more, so that engines take rows as they get on with them. Knows no files and no flags.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Protocol

from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.errors import RowError
from nvcli.jobs.job import JobResult
from nvcli.jobs.writer import ResultWriter
from nvcli.messages import EngineReady
from nvcli.pipeline.answers import OpenRow, Sample, results_of
from nvcli.pipeline.counts import Counts
from nvcli.pipeline.feeder import Feeder
from nvcli.pipeline.prepare import PreparedRow

LONG_WAIT = 0.1
"""Seconds that the loop sleeps at most; bounds how late a signal or a dead engine is noticed."""
SHORT_WAIT = 0.01
"""The same while engines have room and rows are still being tokenized."""


class Engine(Protocol):
    """What the loop needs of an engine replica; `engine.client.EngineClient` is the real one."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady | None: ...
    def add(self, requests: list[Request]) -> None: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...
    def poll(self, timeout: float) -> list[RequestOutput]: ...
    def fileno(self) -> int: ...
    @property
    def stats(self) -> EngineStats: ...


class _Lane:
    """One engine and what it has been given."""

    def __init__(self, engine: Engine, capacity: int) -> None:
        self.engine = engine
        self.capacity = capacity
        """Requests to keep it supplied with."""
        self.ready: EngineReady | None = None
        self.samples: dict[int, Sample] = {}
        """By request id, those whose answer is not complete."""


class Pipeline:
    """One run over one stream of rows."""

    def __init__(
        self,
        engines: Sequence[Engine],
        feeder: Feeder,
        writer: ResultWriter,
        counts: Counts,
        *,
        seed: int,
        max_num_seqs: int,
        on_ready: Callable[[EngineReady], None] = lambda ready: None,
    ) -> None:
        """`counts` is kept up to date for whoever shows progress; `on_ready` is called once for each engine."""
        self._lanes = [_Lane(engine, 2 * max_num_seqs) for engine in engines]
        self._feeder = feeder
        self._writer = writer
        self._counts = counts
        self._seed = seed
        self._on_ready = on_ready
        self._waiting: deque[PreparedRow] = deque()
        self._num_waiting = 0
        """Requests that the waiting rows will make."""
        self._next_request_id = 0

    def run(self, each_round: Callable[[], None] = lambda: None) -> None:
        """Until every row is answered and handed to the writer.

        `each_round` is called at least ten times a second and may raise to end the run. Raises what the engines, the
        reader or the tokenizer raise; rows that were answered before are with the writer by then.
        """
        while True:
            each_round()
            self._take_rows()
            self._feed()
            if self._feeder.ended and not self._waiting and not any(lane.samples for lane in self._lanes):
                break
            self._collect()
            self._writer.tick()
        self._feeder.raise_error()

    def _take_rows(self) -> None:
        """Move rows from the feeder to `_waiting`, and results of rows that failed there to the writer."""
        room = sum(max(0, lane.capacity - len(lane.samples)) for lane in self._lanes)
        while self._num_waiting < room:
            batch = self._feeder.take(timeout=0)
            if batch is None:
                return
            rows = [row for row in batch if isinstance(row, PreparedRow)]
            self._waiting += rows
            self._num_waiting += sum(row.sampling.n for row in rows)
            self._finish([row for row in batch if isinstance(row, JobResult)])

    def _feed(self) -> None:
        """Give waiting rows to the engines that have most room. All samples of a row go to one engine."""
        given: dict[int, list[Request]] = {}
        while self._waiting:
            number, lane = min(
                ((number, lane) for number, lane in enumerate(self._lanes) if lane.ready),
                key=lambda item: len(item[1].samples) - item[1].capacity,
                default=(-1, None),
            )
            if lane is None or len(lane.samples) >= lane.capacity:
                break
            row = OpenRow(self._waiting.popleft(), self._next_request_id)
            self._next_request_id += len(row.samples)
            self._num_waiting -= len(row.samples)
            lane.samples.update(zip(row.request_ids, row.samples, strict=True))
            given.setdefault(number, []).extend(row.requests(self._seed))
        for number, requests in given.items():
            self._counts.started_at = self._counts.started_at or time.monotonic()
            self._lanes[number].engine.add(requests)

    def _collect(self) -> None:
        """Wait for engines to say something, and take it."""
        has_room = any(len(lane.samples) < lane.capacity for lane in self._lanes if lane.ready)
        is_starved = has_room and not self._feeder.ended
        timeout = SHORT_WAIT if is_starved else LONG_WAIT
        rows: list[OpenRow] = []
        lanes = {lane.engine.fileno(): lane for lane in self._lanes}
        for fd in connection.wait(list(lanes), timeout):
            assert isinstance(fd, int)
            lane = lanes[fd]
            if lane.ready is None:
                lane.ready = lane.engine.wait_ready(0)
                if lane.ready is not None:
                    self._on_ready(lane.ready)
            else:
                rows += self._take_outputs(lane)
        if rows:
            self._finish(results_of(rows, self._feeder.tokenizer))
        self._counts.engines = [lane.engine.stats for lane in self._lanes]

    def _take_outputs(self, lane: _Lane) -> list[OpenRow]:
        """The rows that are complete with the outputs of one engine."""
        complete: list[OpenRow] = []
        to_abort: list[int] = []
        for output in lane.engine.poll(0):
            sample = lane.samples.get(output.request_id)
            if sample is None:
                continue  # ended by a stop string or an error of its row; the engine's last words
            if not sample.take(output, self._feeder.tokenizer):
                continue
            row = sample.row
            del lane.samples[output.request_id]
            row.num_open -= 1
            if output.finish_reason is None:
                to_abort.append(output.request_id)
            elif sample.finish_reason in ("error", "abort"):
                row.error = RowError(output.error_type or "aborted", output.error or "the engine dropped this request")
                to_abort += [other for other in row.request_ids if lane.samples.pop(other, None) is not None]
                row.num_open = 0
            if row.num_open == 0:
                complete.append(row)
        if to_abort:
            lane.engine.abort(to_abort)
        return complete

    def _finish(self, results: Sequence[JobResult]) -> None:
        self._counts.add(results)
        self._writer.write(results)
