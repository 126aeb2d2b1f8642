"""A run of rows with known lengths on a machine without hardware, for tests of the time left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from nvcli.engine.request import EngineStats
from nvcli.job_run.answer_lengths import ReadTotals
from nvcli.job_run.counts import Counts
from nvcli.job_run.progress.run_status import RunStatus, RunView
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.jobs.job import JobResult, Usage
from nvcli.messages import pack
from prepared_rows import prepared_row

LOOK_SECONDS = 0.5


class FakeRow:
    """A row, and how long its answer will be."""

    def __init__(self, length: int, *, prompt: int = 20, max_tokens: int | None = None, most: int = 32768) -> None:
        self.length = min(length, max_tokens or most)
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.most = most

    def prepared(self, index: int) -> PreparedRow:
        row = prepared_row(index, [1] * self.prompt, max_tokens=self.max_tokens)
        return row if self.max_tokens is not None else msgspec.structs.replace(row, max_tokens=self.most)


class Machine:
    """How long steps take: a step of `batch` rows that also computes `prompt_tokens`."""

    def __init__(self, fixed: float, each: float, prompt: float) -> None:
        self.seconds: Callable[[int, int], float] = lambda batch, prompts: fixed + each * batch + prompt * prompts


def simulate(
    rows: Sequence[FakeRow], machine: Machine, *, slots: int, rows_ahead: int | None = None
) -> list[tuple[float, RunStatus]]:
    """Compute the rows in order, in so many slots. Return what was shown, each time with the time that was left.

    At most `rows_ahead` rows are read before they are computed; None: all are read at once.
    """
    now = 0.0
    counts = Counts()
    counts.started_at = 0.0
    feeder: Any = type("Feeder", (), {"read": ReadTotals(), "all_read": False})()
    reader: Any = type(
        "Reader", (), {"rows_read": 0, "rows_of_shard": 0, "rows_passed_over": 0, "bytes_read": 0, "bytes_total": None}
    )()
    reader.bytes_total = 100 * len(rows)
    view = RunView(counts, reader, feeder, limit=None, started_at=0.0, clock=lambda: now)
    prepared = [row.prepared(index) for index, row in enumerate(rows)]
    running: dict[int, int] = {}
    started = generated = prompts = new = 0
    looks: list[tuple[float, RunStatus]] = []
    next_look = LOOK_SECONDS
    while counts.rows_done < len(rows):
        most = len(rows) if rows_ahead is None else min(len(rows), started + rows_ahead)
        for index in range(reader.rows_read, most):
            feeder.read.add(prepared[index])
        reader.rows_read = reader.rows_of_shard = most
        reader.bytes_read = 100 * most
        feeder.all_read = most == len(rows)
        prompts += new
        now += machine.seconds(len(running), new)
        generated += len(running)
        for index in list(running):
            running[index] += 1
            row = rows[index]
            if running[index] >= row.length:
                del running[index]
                usage = Usage(prompt_tokens=row.prompt, completion_tokens=row.length)
                counts.lengths.add(prepared[index], row.length, is_cut=row.length == prepared[index].max_tokens)
                counts.add(prepared[index], JobResult(place=prepared[index].place, usage=usage))
        new = 0
        while len(running) < slots and started < reader.rows_read:
            running[started] = 0
            new += rows[started].prompt
            started += 1
        if now >= next_look:
            next_look = now + LOOK_SECONDS
            lengths = [number for index, length in running.items() for number in (length, prepared[index].max_tokens)]
            counts.replicas = [
                EngineStats(
                    num_running=len(running),
                    num_waiting=reader.rows_read - started,
                    prompt_tokens=prompts,
                    generated_tokens=generated,
                    running_lengths=pack(lengths),
                )
            ]
            looks.append((now, view.status()))
    return [(now - at, status) for at, status in looks]
