"""The parent's loop: rows from the feeder through the planner to the replicas, and results to the writer.

It keeps each replica supplied with about twice the requests that it can run, so that a replica never waits for the
parent. It gives little more than that, so that replicas take rows as they get on and the plan can still change. Once
one replica is ready, rows are dealt to those that are still starting too: replicas start within seconds of each other,
and the first would otherwise get all rows of a small job, or the longest ones of a large job. Dealt rows stay here
until their replica is ready; a replica that runs out of rows takes half of them. A replica that dies ends the run, or
its unfinished rows go back to the plan: an answer does not depend on who computes it. The loop knows no files and no
flags.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Protocol

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.messages import EngineReady
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.client import EngineClient
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.errors import CapacityError, NvcliError, RowError, WorkerError, reworded, unexpected
from nvcli.job.job import JobResult, failed
from nvcli.job.run.counts import Counts
from nvcli.job.run.engines import EngineEvents
from nvcli.job.run.feeder import Feeder
from nvcli.job.run.open_rows import OpenRow, results_of
from nvcli.job.run.plan import RunPlan, make_duplicates, make_planner
from nvcli.job.run.several_prompts import PartResults
from nvcli.job.text.prepare import PreparedRow

LONG_WAIT = 0.1
"""Maximum sleep of the loop in seconds, within which signals and dead replicas are noticed."""

_WAVES, _GROUP_WAVES = 2, 3
"""Requests that a replica is kept supplied with, as multiples of those that run at a time. The second is for adapters
that are merged in turn, whose requests may rest (`engine.merged_adapter`)."""
MAX_BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""Maximum bytes of the rows in one replica, including passed-through values; a larger row goes alone."""


class Results(Protocol):
    """The receiver of results; `job.output.writer.ResultWriter` writes them to a file."""

    def write(self, results: Sequence[JobResult]) -> Sequence[JobResult]:
        """Take results, and return them as taken: some may have become errors."""

    def tick(self) -> None:
        """Do what is due. Called in each round."""


_DEATHS = (WorkerError, CapacityError)
"""Errors that end one replica, but not the others."""


class _Replica:
    """An engine and its rows."""

    def __init__(self, number: int, engine: EngineClient, capacity: int) -> None:
        self.number = number
        self.engine = engine
        self._stats_before = engine.stats
        """Statistics of earlier jobs."""
        self.capacity = capacity
        """Number of requests to keep it supplied with."""
        self.ready: EngineReady | None = None
        self.changed: WeightsChanged | None = None
        """Its answer to the last change of the weights."""
        self.rows: dict[int, OpenRow] = {}
        """Rows with incomplete answers, by request id."""
        self.dealt: deque[PreparedRow] = deque()
        """Rows that it gets when it is ready."""
        self._num_dealt = 0
        """Requests of those rows."""
        self.num_bytes = 0
        """Bytes of all these rows."""

    @property
    def stats(self) -> EngineStats:
        """Statistics of the engine for this job."""
        return self.engine.stats.since(self._stats_before)

    @property
    def room(self) -> int:
        """Number of requests to deal to it now, if positive."""
        return self.capacity - len(self.rows) - self._num_dealt if self.num_bytes < MAX_BYTES_IN_FLIGHT else 0

    def deal(self, row: PreparedRow) -> None:
        self.dealt.append(row)
        self._num_dealt += row.sampling.num_samples
        self.num_bytes += row.num_bytes

    def take_back(self) -> PreparedRow:
        """Return the row that was dealt last, to give it to another replica."""
        return self._undeal(self.dealt.pop())

    def take_dealt(self) -> PreparedRow:
        """Return the row that was dealt first, to give it to the engine."""
        return self._undeal(self.dealt.popleft())

    def _undeal(self, row: PreparedRow) -> PreparedRow:
        self._num_dealt -= row.sampling.num_samples
        self.num_bytes -= row.num_bytes
        return row

    def give(self, row: OpenRow) -> None:
        """Record that it was given all requests of a row."""
        self.num_bytes += row.prepared.num_bytes
        for request_id in row.request_ids:
            self.rows[request_id] = row

    def finish(self, row: OpenRow, request_id: int) -> None:
        """Record that the engine is done with a request of a row."""
        del self.rows[request_id]
        row.num_open -= 1
        if row.num_open == 0:
            self.num_bytes -= row.prepared.num_bytes


class JobLoop:
    """A run over one stream of rows."""

    def __init__(
        self,
        run: RunConfig,
        plan: RunPlan,
        engines: Sequence[EngineClient],
        feeder: Feeder,
        writer: Results,
        counts: Counts,
        events: EngineEvents,
        *,
        first_request_id: int = 0,
    ) -> None:
        """Take one engine for each replica. Engines that have run have seen request ids below `first_request_id`.

        `counts` is kept up to date for whoever shows progress. With `job.keep_going` the death of a replica does not
        end the run while another one is left.
        """
        first = plan.first
        capacity = (_GROUP_WAVES if first.merged_adapters else _WAVES) * first.max_num_seqs
        self._replicas = [_Replica(number, engine, capacity) for number, engine in enumerate(engines)]
        self._num_started = len(self._replicas)
        self._stats_of_lost: list[EngineStats] = []
        self._feeder = feeder
        self._planner = make_planner(run, plan.first, self._num_started)
        self._duplicates = make_duplicates(run, self._num_started)
        self._writer = writer
        self._counts = counts
        self._events = events
        self._seed = run.seed
        self._keep_going = run.job.keep_going
        self.next_request_id = first_request_id
        """The lowest unused request id."""
        self._parts = PartResults()

    def run(self, each_round: Callable[[], None]) -> None:
        """Run until every row is answered and handed to the writer.

        `each_round` is called at least ten times a second and may raise to end the run. Raises what the engines, the
        reader or the tokenizer raise; rows that were answered before are with the writer by then.
        """
        while True:
            each_round()
            with self._timed("planning and sending rows"):
                self._take_rows()
                self._send_rows()
            if self._is_done():
                break
            self._wait()
            self._collect()
            with self._timed("writing"):
                self._writer.tick()
        self._feeder.raise_error()

    def _is_done(self) -> bool:
        is_idle = not any(each.rows or each.dealt for each in self._replicas)
        return self._feeder.ended and not self._planner.num_rows and is_idle

    def _take_rows(self) -> None:
        """Move rows from the feeder to the planner, and failed ones to the writer."""
        while not self._is_full:
            batch = self._feeder.take()
            if batch is None:
                return
            failed: list[tuple[PreparedRow | None, JobResult]] = []
            for row in batch:
                part = row.context.part
                if self._counts.leading.is_open and (part is None or part.number == 0):
                    self._counts.leading.expect(row.context.index)
                if isinstance(row, JobResult):
                    failed.append((None, row))
                elif self._duplicates.admit(row):
                    self._planner.add(row)
            self._finish(failed)
            self._finish_duplicates()

    def _send_rows(self) -> None:
        """Deal rows to the replicas with the most room, and send those of the replicas that are ready."""
        ready = [replica for replica in self._replicas if replica.ready is not None]
        if not ready:
            return
        self._deal_rows()
        for replica in ready:
            if not replica.rows and not replica.dealt:
                starting = max(self._replicas, key=lambda each: len(each.dealt))
                for _ in range((len(starting.dealt) + 1) // 2):
                    replica.deal(starting.take_back())
            self._send_dealt(replica)

    def _deal_rows(self) -> None:
        """Deal planned rows as long as a replica has room, except those that no one needs. All samples of a row go to
        one replica."""
        unwanted: list[PreparedRow] = []
        while self._planner.num_rows:
            replica = max(self._replicas, key=lambda each: each.room)
            if replica.room <= 0:
                break
            prepared = self._planner.take(replica.number)
            assert prepared is not None
            if self._is_unwanted(prepared):
                self._counts.lengths.drop(prepared, prepared.sampling.num_samples)
                unwanted.append(prepared)
            else:
                replica.deal(prepared)
        self._abandon(unwanted)

    def _send_dealt(self, replica: _Replica) -> None:
        """Send a replica the rows that were dealt to it."""
        requests: list[Request] = []
        while replica.dealt:
            row = OpenRow(replica.take_dealt(), self.next_request_id)
            self.next_request_id += len(row.samples)
            if (made := self._make_requests(row)) is not None:
                replica.give(row)
                requests += made
        if requests:
            self._counts.started_at = self._counts.started_at or time.monotonic()
            try:
                replica.engine.add(requests)
            except _DEATHS as error:
                self._drop_replica(replica, error)

    def _make_requests(self, row: OpenRow) -> list[Request] | None:
        """Return the requests of a row; None if that failed, which finishes the row."""
        try:
            return row.requests(self._seed)
        except BaseException as error:
            row.error = unexpected(error, "making requests of the row")
        self._counts.lengths.drop(row.prepared, row.num_open)
        self._finish_rows([row])
        return None

    def abort_unwanted(self) -> None:
        """Abort running rows that nobody waits for any more. Waiting ones end when it is their turn."""
        for replica in [*self._replicas]:
            rows = {id(row): row for row in replica.rows.values() if self._is_unwanted(row.prepared)}.values()
            open_ids = [number for row in rows for number in row.request_ids if number in replica.rows]
            for row in rows:
                self._counts.lengths.drop(row.prepared, row.num_open)
            for number in open_ids:
                replica.finish(replica.rows[number], number)
            self._abandon([row.prepared for row in rows])
            try:
                if open_ids:
                    replica.engine.abort(open_ids)
            except _DEATHS as error:
                self._drop_replica(replica, error)

    def change_weights(self, change: WeightsChange) -> None:
        """Change the weights of all replicas, or their memory, and forget all answers. No row may be open that somebody
        waits for; `changed` tells when it is done."""
        self._duplicates.forget_answers()
        for replica in self._replicas:
            replica.changed = None
            replica.engine.change_weights(change)

    @property
    def changed(self) -> WeightsChanged | None:
        """The answer of the replicas to the last change of the weights; None: not all of them have answered.

        Raises WorkerError if some replicas have changed and others have not.
        """
        answers = [replica.changed for replica in self._replicas if replica.changed is not None]
        if len(answers) < len(self._replicas):
            return None
        refusals = [answer for answer in answers if answer.error_kind]
        if refusals and len(refusals) < len(answers):
            raise WorkerError(
                f"{len(refusals)} of {len(answers)} copies of the model did not do as the others: {refusals[0].message}"
            )
        return answers[0]

    def _is_unwanted(self, row: PreparedRow) -> bool:
        """Tell whether no one still needs the answer of a row: neither its caller nor an equal row."""
        caller = row.context.caller
        return caller is not None and caller.is_gone and not self._duplicates.is_awaited(row)

    def _abandon(self, rows: Sequence[PreparedRow]) -> None:
        """Finish rows that nobody waits for, which are not computed (any further)."""
        error = RowError("aborted", "no one is waiting for this answer any more")
        results = [(row, failed(row.context, error)) for row in rows]
        self._finish(results)
        for row, result in results:
            self._duplicates.finish(row, result, error)

    @property
    def _is_full(self) -> bool:
        """Whether rows should wait in the feeder."""
        return self._planner.is_full or self._duplicates.is_full

    def _wait(self) -> None:
        """Sleep until a replica has news, or there are rows for which the planner has room."""
        rows_may_come = not self._feeder.ended
        sources = [replica.engine.fileno() for replica in self._replicas]
        if rows_may_come and not self._is_full:
            sources.append(self._feeder.fileno())
        if not any(replica.ready for replica in self._replicas):
            waits_for = "start-up"
        elif rows_may_come and any(replica.ready and not replica.rows for replica in self._replicas):
            waits_for = "engines waiting for rows"
        else:
            waits_for = "waiting for the engines"
        with self._timed(waits_for):
            connection.wait(sources, LONG_WAIT)

    def _collect(self) -> None:
        """Collect the outputs of all replicas: pass answers to the writer, and drop dead replicas."""
        complete: list[OpenRow] = []
        deaths: list[tuple[_Replica, NvcliError]] = []
        with self._timed("taking answers"):
            for replica in self._replicas:  # those that say nothing too: a replica may be silent because it is dead
                try:
                    self._poll_replica(replica, complete)
                except _DEATHS as error:
                    deaths.append((replica, error))
        if complete:
            self._finish_rows(complete)
        for replica, death in deaths:  # after the answers of the others are safe
            self._drop_replica(replica, death)
        self._counts.replicas = [*(replica.stats for replica in self._replicas), *self._stats_of_lost]
        self._counts.num_waiting_for_equals = self._duplicates.num_rows
        num_dealt = sum(len(replica.dealt) for replica in self._replicas)
        self._counts.num_planned = self._planner.num_rows + num_dealt + self._counts.num_waiting_for_equals

    def _poll_replica(self, replica: _Replica, complete: list[OpenRow]) -> None:
        """Collect a replica's outputs, and the rows that they complete. Raises the error that the replica died of."""
        if replica.ready is None:
            replica.ready = replica.engine.wait_ready(0)
            if replica.ready is not None:
                self._events.replica_ready(replica.ready)
            return
        to_abort: list[int] = []
        outputs = replica.engine.poll(0)
        replica.changed = replica.engine.take_changed() or replica.changed
        for note in replica.engine.take_notes():
            self._events.warn(note)
        for output in outputs:
            row = replica.rows.get(output.request_id)
            if row is None:
                continue  # a stop string or an error of its row has ended this request meanwhile
            try:
                to_abort += self._take_output(replica, row, output)
            except BaseException as error:
                to_abort += self._fail(replica, row, unexpected(error, "reading the answer"))
            if row.num_open == 0:
                complete.append(row)
        if to_abort:
            replica.engine.abort(to_abort)

    def _take_output(self, replica: _Replica, row: OpenRow, output: RequestOutput) -> list[int]:
        """Add an output to its row. Returns the requests to abort."""
        sample, is_complete = row.take(output, self._feeder.tokenizer)
        caller = row.prepared.context.caller
        if row.streams and sample is row.samples[0] and caller is not None:
            text = row.take_rest(sample, self._feeder.tokenizer) if is_complete else sample.take_settled()
            if text:
                caller.take_text(text)
        if not is_complete:
            return []
        replica.finish(row, output.request_id)
        if output.finish_reason is None:
            self._counts.lengths.add(row.prepared, len(sample.token_ids), is_cut=False)
            return [output.request_id]  # a stop string ended it, of which the engine knows nothing
        if sample.finish_reason not in ("error", "abort"):
            self._counts.lengths.add(row.prepared, len(sample.token_ids), is_cut=sample.finish_reason == "length")
            return []
        self._counts.lengths.drop(row.prepared, 1)
        error = RowError(output.error_type or "aborted", output.error or "the engine dropped this request")
        return self._fail(replica, row, error)

    def _fail(self, replica: _Replica, row: OpenRow, error: RowError) -> list[int]:
        """End a row with an error. Returns its requests to abort."""
        row.error = error
        others = [other for other in row.request_ids if other in replica.rows]
        for other in others:
            replica.finish(row, other)
        self._counts.lengths.drop(row.prepared, len(others))
        return others

    def _drop_replica(self, replica: _Replica, error: NvcliError) -> None:
        """Drop a dead replica and return its unfinished rows to the planner.

        Raises `error` if it ends the run.
        """
        if self._num_started > 1:
            error = reworded(error, f"copy {replica.number} of the model: {error}")
        if not self._keep_going or len(self._replicas) == 1:
            raise error
        self._replicas.remove(replica)
        given = {id(row): row.prepared for row in replica.rows.values()}  # the samples of a row are one row
        rows = [*given.values(), *replica.dealt]
        for prepared in rows:
            self._planner.add(prepared)
        # What it computed still counts; nothing runs or waits in it any more.
        self._stats_of_lost.append(
            msgspec.structs.replace(replica.stats, num_running=0, num_waiting=0, num_blocks=0, num_used_blocks=0)
        )
        replica.engine.close()
        self._counts.num_lost_replicas += 1
        self._events.replica_lost(error, len(rows))

    def _finish_rows(self, rows: Sequence[OpenRow]) -> None:
        """Turn complete rows into results, also for equal rows."""
        with self._timed("detokenizing"):
            results = results_of(rows, self._feeder.tokenizer)
        self._finish([(row.prepared, result) for row, result in zip(rows, results, strict=True)])
        for row, result in zip(rows, results, strict=True):
            self._duplicates.finish(row.prepared, result, row.error)
        self._finish_duplicates()

    def _finish_duplicates(self) -> None:
        if ready := self._duplicates.take_ready():
            self._finish(ready, computed=False)

    def _finish(self, results: Sequence[tuple[PreparedRow | None, JobResult]], *, computed: bool = True) -> None:
        """Count and write results, each with its row as for `Counts.add`."""
        done = [each for each in results if each[1].context.part is None]
        wholes = self._join(results, computed=computed) if len(done) < len(results) else []
        if not done and not wholes:
            return
        with self._timed("writing"):
            written = self._writer.write([result for _, result in (*done, *wholes)])
        for number, result in enumerate(written):
            if number < len(done):
                self._counts.add(done[number][0], result, computed=computed)
            else:
                self._counts.add_row(wholes[number - len(done)][0], result, computed=computed)
            if result.traceback:
                self._events.row_tracebacks.add(result)

    def _join(
        self, results: Sequence[tuple[PreparedRow | None, JobResult]], *, computed: bool
    ) -> list[tuple[PreparedRow | None, JobResult]]:
        """Count the results of single prompts of a row, and return the rows that they complete."""
        wholes = []
        for prepared, result in results:
            if (part := result.context.part) is not None:
                self._counts.add_work(prepared, result, computed=computed)
                whole = self._parts.add(part, result)
                if whole is not None:
                    wholes.append((prepared, whole))
        return wholes

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Count the time of a block towards `part`, without timed blocks inside it."""
        seconds = self._counts.seconds
        inside = sum(seconds.values())
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds[part] += time.perf_counter() - started - (sum(seconds.values()) - inside)
