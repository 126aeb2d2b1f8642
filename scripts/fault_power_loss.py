"""Simulates a power loss at each system call of a job's output, and continues from what it may leave.

A job begins, continues, retries its failed rows, overwrites another one's output, or follows its input, in which rows
were edited, moved, added and removed; in all kinds of files and both orders. Every call that changes its files is
recorded. For each of them the folders that a power loss may leave are made (`crash_states`), and the same command is
given there: the output must then be that of a job that was never touched, every row that was synced must have been
kept, and so must the answer of every row that an update finds unchanged. Rows of two jobs must never be together
otherwise, and nothing else may be left.
Only the job layer runs, in this process, without engines.
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from crash_states import CallRecorder, CrashPoint, Folder, crash_states
from nvcli.core.config_types import Order
from nvcli.errors import ConfigError, RowError
from nvcli.job.compression import Unpacker, compression_of
from nvcli.job.job import Choice, JobResult, RowContext, Usage, failed
from nvcli.job.output.job_output import JobOutput, OutputOptions, open_output
from nvcli.job.output.lock_file import this_process
from nvcli.job.output.manifest import Manifest
from nvcli.job.output.output_scan import valid_rows
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.writer import ResultWriter
from nvcli.job.own_files import (
    digests_path,
    is_csv,
    is_parquet,
    is_table,
    lock_path,
    manifest_path,
    own_files,
    rows_path,
)
from nvcli.job.rows.row_digest import DIGEST_BYTES, InputRows, row_digest

NAMES = ("out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet", "out.csv")
ORDERS: tuple[Order, ...] = ("completion", "input")
ACTIONS = ("begin", "continue", "retry", "overwrite", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallJob:
    """A job whose answers are known: a row of job `name` is answered by `<name> <row>`, or has failed."""

    name: str
    path: Path
    order: Order
    rows: tuple[str, ...]
    """The rows of its input: an id, or nothing before the dot, and a text."""
    failing: frozenset[int] = frozenset()
    rows_a_flush: int = 1
    keeps: SmallJob | None = None
    """The job of which it keeps the answers to rows that are the same."""
    setting: str = ""
    """The name of the job whose settings it has, if that is another one."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def run(self, rows: Sequence[int] | None = None, *, finish: bool = True, **options: Any) -> JobOutput:
        """Answer those of these rows (None: all) that are missing, and finish the output or leave it as it is."""
        manifest = Manifest(
            created=1000,
            model="m",
            facts={"job": self.setting or self.name},
            inputs=[("in.jsonl", " ".join(self.rows))],
        )
        settings = OutputOptions(order=self.order, identify_rows=self.identify_rows, **options)
        output = open_output(str(self.path), manifest, settings)
        try:
            if output.finished is not None:
                return output
            answered = output.answered.all
            todo = [i for i in (range(self.num_rows) if rows is None else rows) if i not in answered]
            reorder = ReorderBuffer(answered.next_missing, max_bytes=500) if self.order == "input" else None
            writer = ResultWriter(output.sink, output.form, reorder=reorder)
            for start in range(0, len(todo), self.rows_a_flush):
                batch = todo[start : start + self.rows_a_flush]
                self._read(output, max(batch) + 1)
                writer.write(map(self.result, batch))
                writer.flush()
            self._read(output, self.num_rows)
            if not finish:
                writer.close_early()
                return output
            writer.close()
            errors = output.answered.errors + Counter("prompt_too_long" for i in todo if i in self.failing)
            output.finish(rows=answered.count + len(todo), errors=errors, rows_read=self.num_rows, all_read=True)
            return output
        finally:
            output.close()

    def identify_rows(self) -> InputRows:
        rows = InputRows()
        for index in range(self.num_rows):
            own_id = self._own_id(index)
            rows.add(self._digest(index), name=f"row-{index}" if own_id is None else None, is_repeated=False)
        return rows

    def result(self, index: int) -> JobResult:
        own_id, name = self._own_id(index), f"row-{index}"
        context = RowContext(
            id=own_id or name,
            is_named=own_id is None,
            index=index,
            line=f"line {index + 1}",
            extra={"job": msgspec.Raw(msgspec.json.encode(self.name))},
        )
        if index in self.failing:
            return failed(context, RowError("prompt_too_long", "too long"))
        text = f"{self.name} {self.rows[index]} " + "x" * (37 * index % 90)
        choices = [Choice(index=0, text=text, finish_reason="stop")]
        return JobResult(context=context, choices=choices, usage=Usage(prompt_tokens=index))

    def expected(self, index: int) -> str | None:
        """Return the answer that a row must have in the end; None: it fails."""
        old = self.keeps
        if old is not None and self.rows[index] in old.rows:
            before = old.rows.index(self.rows[index])
            if before not in old.failing:
                return answer_of(old.result(before))
        return answer_of(self.result(index))

    def _read(self, output: JobOutput, end: int) -> None:
        """Do as the reader does with the rows before `end`."""
        for index in range(end):
            if output.digests is not None and output.digests.wants(index):
                output.digests.add(self._digest(index))

    def _own_id(self, index: int) -> str | None:
        return self.rows[index].split(".")[0] or None

    def _digest(self, index: int) -> bytes:
        return row_digest(self.rows[index].encode(), self._own_id(index))


@dataclass(slots=True)
class Findings:
    """The states that were tried, and the failures."""

    num_calls: int = 0
    num_states: int = 0
    by_action: Counter[str] = field(default_factory=Counter)
    """States by action."""
    failures: list[str] = field(default_factory=list)


class PowerLosses:
    """Loses the power in every way at every call of one action, and continues."""

    def __init__(self, work: Path, name: str, order: Order, rng: random.Random, findings: Findings) -> None:
        """`work` is an empty folder."""
        self._folder = work / "job"
        self._resumed = work / "resumed"
        for folder in (self._folder, self._resumed):
            folder.mkdir()
        self._rng = rng
        self._findings = findings
        self._path = self._resumed / name
        num_rows = rng.randint(3, 9)
        self._old = SmallJob(
            name="old",
            path=self._folder / name,
            order=order,
            rows=tuple(f"r{i}.a" if i % 3 else f".{i}" for i in range(num_rows)),
            failing=frozenset(rng.sample(range(num_rows), 2)),
            rows_a_flush=rng.randint(1, 3),
        )
        self._seen: set[tuple[tuple[str, bytes], ...]] = set()

    def run(self, action: str, *, num_random: int) -> None:
        """Record the action, and continue from `num_random` random states of each call beside the extreme ones."""
        rng, old = self._rng, self._old
        rows = rng.sample(range(old.num_rows), old.num_rows)
        if action == "continue":
            old.run(rows[: rng.randint(1, old.num_rows - 1)], finish=False)
            self._damage(rows_path(old.path))
        elif action == "retry" or (action == "overwrite" and rng.random() < 0.5):
            old.run(rows)
        elif action == "overwrite":
            old.run(rows[:2], finish=False)
        job, options = old, {}
        if action == "retry":
            job, options = replace(old, failing=frozenset()), {"retry_errors": True}
        elif action == "overwrite":
            job, options = replace(old, name="new"), {"overwrite": True}
        elif action == "update":
            answered = rows if rng.random() < 0.7 else rows[: rng.randint(1, old.num_rows - 1)]
            old.run(answered, finish=answered == rows)
            job, options = self._changed(), {"update": True}
            rows = rng.sample(range(job.num_rows), job.num_rows)
        with CallRecorder(self._folder) as recorder:
            job.run(rows, finish=rng.random() < 0.8, **options)
        self._findings.num_calls += recorder.num_calls
        own = {path.name for path in own_files(job.path)}
        for point in recorder.points:
            if strange := {name for change in point.changes for name in change} - own:
                self._findings.failures.append(f"{action}: {strange} is not among the job's own files")
            for state in crash_states(point, rng, num_random=num_random):
                key = tuple(sorted(state.items()))
                if key not in self._seen:
                    self._seen.add(key)
                    self._findings.num_states += 1
                    self._findings.by_action[action] += 1
                    self._resume(action, replace(job, path=self._path), point, state)

    def _changed(self) -> SmallJob:
        """Return the old job, as far as it came, with an input that was changed in all ways."""
        rng, old = self._rng, self._old
        rows = list(old.rows)
        for index in rng.sample(range(len(rows)), rng.randint(0, 2)):
            rows[index] += "b"
        del rows[rng.randrange(len(rows))]
        if rng.random() < 0.5:
            rng.shuffle(rows)
        rows.insert(rng.randrange(len(rows) + 1), "new.a")
        found = {row.index for row, _ in valid_rows(rows_path(old.path))} if rows_path(old.path).exists() else set()
        if is_table(old.path) and old.path.exists():
            found = {index for index, _ in read_answers(old.path)}
        answered = replace(old, failing=old.failing.union(set(range(old.num_rows)) - found))
        return replace(old, name="new", rows=tuple(rows), failing=frozenset(), keeps=answered, setting=old.name)

    def _damage(self, path: Path) -> None:
        """Damage a file, if it is there, as an earlier power loss may have done."""
        if not path.exists():
            return
        with path.open("ab") as file:
            file.write(self._rng.choice([b"", bytes(50), b'{"id":1,"index":0', b"\n\n", b"{}\n"]))

    def _resume(self, action: str, job: SmallJob, point: CrashPoint, state: Folder) -> None:
        """Give the commands that a user may give in this state, each from the state anew, and look at the outputs."""
        commands: list[Callable[[], None]]
        if action == "overwrite":
            old = replace(self._old, path=self._path)
            commands = [
                lambda: self._finish(job, overwrite=True),
                lambda: self._finish_or_be_refused(job, point),
                lambda: self._finish_or_be_refused(old, None),
            ]
        elif action == "retry":
            failed_before = self._old.failing
            commands = [
                lambda: self._finish(job, point, retry_errors=True),
                lambda: self._finish(job, may_fail=failed_before),
            ]
        elif action == "update":
            commands = [
                lambda: self._finish(job, point, update=True),
                lambda: self._finish_or_be_refused(job, point),
                lambda: self._finish_or_be_refused(replace(self._old, path=self._path), None),
            ]
        else:
            commands = [lambda: self._finish(job, point)]
        for number, command in enumerate(commands):
            self._make(state)
            try:
                command()
            except Exception as error:
                files = {name: f"{len(data)} bytes" for name, data in state.items()}
                self._findings.failures.append(
                    f"{action} of {job.path.name} in order of {job.order}, after `{point.call}`, command {number}: "
                    f"{type(error).__name__}: {error}; the power loss left {files}"
                )

    def _make(self, state: Folder) -> None:
        for path in self._resumed.iterdir():
            path.unlink()
        boot = this_process().boot.encode()
        for name, data in state.items():
            if name == lock_path(self._path).name:
                data = data.replace(boot, bytes(reversed(boot)))  # the machine has been started anew
            (self._resumed / name).write_bytes(data)

    def _finish_or_be_refused(self, job: SmallJob, point: CrashPoint | None) -> None:
        rows = rows_path(job.path)
        before = contents(rows)
        manifest = manifest_path(job.path)
        is_updating = manifest.exists() and b'"is_updating": true' in manifest.read_bytes()
        try:
            self._finish(job, point)
        except ConfigError as error:
            expect(any(why in str(error) for why in ("made by another job", "from another input")), f"refused: {error}")
            expect(is_updating or contents(rows) == before, "a refused output was changed")

    def _finish(
        self, job: SmallJob, point: CrashPoint | None = None, *, may_fail: Collection[int] = (), **options: bool
    ) -> None:
        """Finish the job. Rows that `may_fail` may be failed ones; a row that was synced at the point must be kept."""
        output = job.run(**options)
        expected = {index: job.expected(index) for index in range(job.num_rows)}
        found = read_answers(job.path)
        indices = [index for index, _ in found]
        expect(sorted(indices) == list(expected), f"the rows are {indices}, of {job.num_rows}")
        if job.order == "input":
            expect(indices == sorted(indices), f"the rows are not in order: {indices}")
        for index, answer in found:
            expect(answer == expected[index] or (index in may_fail and answer is None), f"row {index} is {answer!r}")
        if point is not None and output.finished is None:
            lost = synced_rows(point, job) - {index for index in range(job.num_rows) if index in output.answered.all}
            expect(not lost, f"rows {lost} were on the disk and were computed again")
        expect(job.run().finished is not None, "the finished output is not taken for one")
        names = {path.name for path in self._resumed.iterdir()}
        usual = {job.path.name, manifest_path(job.path).name, digests_path(job.path).name}
        expect(usual <= names <= usual | {rows_path(job.path).name}, f"left behind: {names}")
        num_digests = digests_path(job.path).stat().st_size // DIGEST_BYTES
        expect(num_digests == job.num_rows, f"there are digests of {num_digests} rows, of {job.num_rows}")
        if names != usual:
            expect(any(answer is None for _, answer in found), "the rows of a complete table are left behind")


def expect(holds: bool, what: str) -> None:
    """Raise AssertionError where something does not hold."""
    if not holds:
        raise AssertionError(what)


def contents(path: Path) -> bytes:
    """Return the bytes of a file; none where there is no file."""
    return path.read_bytes() if path.exists() else b""


def answer_of(result: JobResult) -> str | None:
    return result.choices[0].text if result.error is None else None


def read_answers(path: Path) -> list[tuple[int, str | None]]:
    """Return number and answer of each row of an output, in its order; None: the row has failed."""
    rows: list[dict[str, Any]]
    if is_parquet(path):
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif is_csv(path):
        with path.open(newline="") as file:
            return [(int(row["index"]), row["generated_text"] or None) for row in csv.DictReader(file)]
    else:
        data, compression = path.read_bytes(), compression_of(path.name)
        plain = b"".join(Unpacker(compression).feed(data)) if compression else data
        rows = [msgspec.json.decode(line) for line in plain.splitlines()]
    return [(row["index"], row["choices"][0]["text"] if row["error"] is None else None) for row in rows]


def synced_rows(point: CrashPoint, job: SmallJob) -> set[int]:
    """Return the rows that a power loss at this point cannot take, whichever names it keeps: those of `job` alone."""
    name = rows_path(job.path).name
    inodes = [point.synced_names.get(name), *(change[name] for change in point.changes if name in change)]
    kept = [rows_in(point.synced.get(inode, b""), job) if inode is not None else set() for inode in inodes]
    return set.intersection(*kept)


def rows_in(data: bytes, job: SmallJob) -> set[int]:
    """Return the rows of `job` that are answered without an error in these bytes of its output."""
    with tempfile.TemporaryDirectory(dir=job.path.parent.parent) as folder:
        path = Path(folder) / rows_path(job.path).name
        path.write_bytes(data)
        return {
            row.index
            for row, line in valid_rows(path)
            if row.error_type is None and msgspec.json.decode(line)["job"] == job.name
        }


def lose_power_everywhere(
    rng: random.Random,
    findings: Findings,
    *,
    work: Path,
    names: Sequence[str] = NAMES,
    orders: Sequence[Order] = ORDERS,
    num_random: int,
) -> None:
    """Try every action with these kinds of files and orders once, in a folder of its own under `work`."""
    for name in names:
        for order in orders:
            for action in ACTIONS:
                with tempfile.TemporaryDirectory(dir=work) as folder:
                    PowerLosses(Path(folder), name, order, rng, findings).run(action, num_random=num_random)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--states", type=int, default=10_000, help="so many are tried, at least")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Lose the power at each system call, until so many states were tried; return the exit code."""
    rng, findings, started_at = random.Random(options.seed), Findings(), time.monotonic()
    memory = Path("/dev/shm")  # nothing here is meant to last, and syncing costs nothing there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as work:
        while findings.num_states < options.states and not findings.failures:
            lose_power_everywhere(rng, findings, work=Path(work), num_random=6)
            kinds = ", ".join(f"{action} {count:,}" for action, count in findings.by_action.items())
            print(
                f"{findings.num_states:,} states after {findings.num_calls:,} system calls ({kinds}), "
                f"{len(findings.failures)} failures, {time.monotonic() - started_at:.0f} s",
                flush=True,
            )
    for failure in findings.failures[:20]:
        print(f"FAILED: {failure}")
    return 1 if findings.failures else 0
