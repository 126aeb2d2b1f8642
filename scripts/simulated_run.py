"""A run of rows with known lengths on a machine without hardware: what it shows as the time left, and what is left.

The figures are those of `RunView`, on a clock of its own. Steps take a fixed time, a time for each running sample, for
each key that samples attend to, and for each prompt token. Rows are computed in the order of the planner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import EngineStats
from nvcli.job.job import ErrorInfo, JobResult, RowContext, Usage
from nvcli.job.planning.planner import Planner
from nvcli.job.progress.run_status import RunStatus, RunView
from nvcli.job.run.counts import Counts, ReadTotals
from nvcli.job.text.prepare import PreparedRow

ROW_BYTES = 100


class FakeRow(NamedTuple):
    """A row, and how long its answers will be."""

    length: int
    """The length of each answer, where nothing cuts it."""
    prompt: int = 20
    max_tokens: int | None = None
    most: int = 32768
    """The most tokens of a row that names no `max_tokens`."""
    n: int = 1
    cached: int = 0
    """Prompt tokens that are found in the prefix cache."""
    fails: bool = False
    """Whether the row is refused before it is computed."""

    def prepared(self, index: int) -> PreparedRow:
        return PreparedRow(
            context=RowContext(id=index, index=index, line=f"line {index + 1}"),
            prompt_ids=pack([1]),
            num_prompt_tokens=self.prompt,
            max_tokens=self.max_tokens or self.most,
            stop_ids=[],
            sampling=SamplingParams(max_tokens=self.max_tokens, n=self.n),
            num_bytes=ROW_BYTES,
        )


class Machine(NamedTuple):
    """The seconds that a step takes."""

    fixed: float
    each: float
    """The time of a running sample."""
    key: float
    """The time of a key that a sample attends to."""
    prompt: float
    """The time of a prompt token."""
    is_gpu: bool = False

    def seconds(self, steps: int, running: int, keys: float) -> float:
        """Return the time of so many steps with the same samples, which attend to `keys` keys in the first one."""
        all_keys = steps * keys + running * steps * (steps - 1) / 2
        return steps * (self.fixed + self.each * running) + self.key * all_keys


class Look(NamedTuple):
    """The status shown at a moment, and the truth."""

    at: float
    """Seconds since the first request."""
    left: float
    status: RunStatus

    @property
    def done(self) -> float:
        """The share of the time that has passed."""
        return self.at / (self.at + self.left)


class _Running(NamedTuple):
    end: int
    """The step in which it ends."""
    number: int
    start: int
    row: int


def simulate(
    rows: Sequence[FakeRow],
    machine: Machine,
    *,
    slots: int,
    rows_ahead: int | None = None,
    look_seconds: float = 0.5,
    rows_resumed: int = 0,
) -> list[Look]:
    """Compute the rows, in so many slots. Return what was shown, and what was left.

    At most `rows_ahead` rows are read before they are computed; None: all are read at once. An earlier run has answered
    the first `rows_resumed` rows.
    """
    run = _Run(rows, machine, slots=slots, rows_ahead=rows_ahead, rows_resumed=rows_resumed)
    shown = list(run.looks(look_seconds))
    return [Look(at, run.now - at, status) for at, status in shown]


class _Run:
    def __init__(
        self, rows: Sequence[FakeRow], machine: Machine, *, slots: int, rows_ahead: int | None, rows_resumed: int
    ) -> None:
        self.now = 0.0
        self._rows = rows
        self._machine = machine
        self._slots = slots
        self._rows_ahead = rows_ahead or len(rows)
        self._prepared = [row.prepared(index) for index, row in enumerate(rows)]
        self._planner = Planner(block_size=None, max_rows=2048, max_bytes=1 << 30, max_passed_over=4096)
        self._counts = Counts()
        self._counts.started_at = 0.0
        self._counts.rows_resumed = rows_resumed
        self._num_read = rows_resumed
        self._feeder: Any = type("Feeder", (), {"read": ReadTotals(), "all_read": False})()
        self._reader: Any = type(
            "Reader", (), {"rows_passed_over": rows_resumed, "bytes_total": ROW_BYTES * len(rows)}
        )()
        self._view = RunView(
            self._counts,
            self._reader,
            self._feeder,
            limit=None,
            started_at=0.0,
            on_gpu=machine.is_gpu,
            clock=lambda: self.now,
        )
        self._queue: list[int] = []
        """The row of each sample that was given to the replica and waits."""
        self._running: list[_Running] = []
        """A heap."""
        self._keys = 0
        """The keys that the running samples attend to in the next step."""
        self._step = self._num_begun = self._generated = self._prompts = self._cached = 0
        self._samples_left = [row.n for row in rows]

    def looks(self, look_seconds: float) -> Iterator[tuple[float, RunStatus]]:
        """Go on to the end, and yield what is shown every so many seconds."""
        next_look = look_seconds
        self._admit()
        while self._running:
            steps = self._running[0].end - self._step
            while self._seconds(steps) > next_look - self.now and steps > 1:
                steps = max(1, min(steps - 1, int(steps * (next_look - self.now) / self._seconds(steps))))
            self.now += self._seconds(steps)
            self._step += steps
            self._generated += steps * len(self._running)
            self._keys += steps * len(self._running)
            while self._running and self._running[0].end == self._step:
                self._end(heapq.heappop(self._running))
            self._admit()
            if self.now >= next_look:
                next_look = self.now + look_seconds
                self._report()
                yield self.now, self._view.status()

    def _seconds(self, steps: int) -> float:
        return self._machine.seconds(steps, len(self._running), self._keys)

    def _read(self) -> None:
        while self._num_read < len(self._rows) and self._planner.num_rows < self._rows_ahead:
            row = self._prepared[self._num_read]
            self._num_read += 1
            if self._rows[row.context.index].fails:
                error = ErrorInfo(type="invalid_json", message="…")
                self._counts.add(None, JobResult(context=row.context, error=error))
                continue
            self._feeder.read.add(row)
            self._planner.add(row)
        self._reader.rows_read = self._reader.rows_of_shard = self._num_read
        self._reader.bytes_read = ROW_BYTES * self._num_read
        self._feeder.all_read = self._num_read == len(self._rows)

    def _admit(self) -> None:
        """Let waiting samples take the free slots, and compute their prompts."""
        self._read()
        prompts = 0
        while len(self._running) < self._slots:
            while len(self._queue) < self._slots and (taken := self._planner.take()) is not None:
                self._queue += [taken.context.index] * taken.sampling.n
            if not self._queue:
                break
            index = self._queue.pop(0)
            row = self._rows[index]
            length = max(1, min(row.length, row.max_tokens or row.most))
            heapq.heappush(self._running, _Running(self._step + length, self._num_begun, self._step, index))
            self._num_begun += 1
            self._keys += row.prompt
            self._prompts += row.prompt
            self._cached += row.cached
            prompts += row.prompt - row.cached
        self._read()
        self.now += self._machine.prompt * prompts

    def _report(self) -> None:
        """Bring the counts up to date, as the replica does a few times a second."""
        self._counts.num_planned = self._planner.num_rows
        lengths = []
        for sample in self._running:
            row = self._rows[sample.row]
            lengths += [self._step - sample.start, self._prepared[sample.row].max_tokens, row.prompt]
        self._counts.replicas = [
            EngineStats(
                num_running=len(self._running),
                num_waiting=len(self._queue),
                prompt_tokens=self._prompts,
                cached_tokens=self._cached,
                generated_tokens=self._generated,
                running_lengths=pack(lengths),
            )
        ]

    def _end(self, sample: _Running) -> None:
        """Count an answer that has ended, and its row once all of its answers have."""
        row, prepared = self._rows[sample.row], self._prepared[sample.row]
        length = sample.end - sample.start
        self._keys -= row.prompt + length
        self._counts.lengths.add(prepared, length, is_cut=length == prepared.max_tokens)
        self._samples_left[sample.row] -= 1
        if not self._samples_left[sample.row]:
            usage = Usage(prompt_tokens=row.prompt, completion_tokens=length * row.n)
            self._counts.add(prepared, JobResult(context=prepared.context, usage=usage))
