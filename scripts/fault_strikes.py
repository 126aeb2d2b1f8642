"""Every fault that a run must survive or end well with, by real signals, each in a run of its own.

A rank is killed, stopped, raises an exception, runs out of memory; the engine is killed and stopped; the command is
killed and interrupted: in the phases of a start, and while rows are answered. After each fault: the run ended in time,
with the exit code and the one line that names process, phase and cause; what was answered is what an untouched run
answers; and no process, /dev/shm entry or GPU memory is left. In the end the same commands finish all jobs, and every
answer is that of the untouched run. A row is printed for each fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_tasks import raw_prompt, sample_lookups
from fault_job import (
    END_SECONDS,
    RUNNING,
    WAIT_SECONDS,
    FaultNotReached,
    Job,
    Resources,
    descendants,
    exhaust_memory,
)

STEP_TIMEOUT = 5
"""Seconds: a stopped process ends the run after so many."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: the victim, the moment, the action, and how the run must end."""

    name: str
    phase: str
    """The phase of the last rank; RUNNING: rows are being answered."""
    victim: str
    action: signal.Signals | None
    """None: an exception in the last rank's step."""
    code: int
    line: str
    """Pattern of the only line that says how the run ended; {rank}, {pid}, {where} and {engine_at} stand for the
    victim's. Empty: nobody was left to say anything."""

    @property
    def seconds(self) -> float:
        return END_SECONDS + (STEP_TIMEOUT if self.action == signal.SIGSTOP else 0)


OUT_OF_MEMORY = "out of memory"


def faults(*, graphs: bool) -> Iterator[Fault]:
    """`graphs`: there is a phase in which CUDA graphs are captured."""
    start = ("load weights", "warm up", *(["capture graphs"] if graphs else []))
    for phase in (*start, RUNNING):
        yield Fault(
            "kill rank", phase, "rank", signal.SIGKILL, 3, r"rank {rank} \(pid {pid}\) was killed by SIGKILL; "
            "it was at: {where}$",
        )  # fmt: skip
        yield Fault("Ctrl-C", phase, "parent", signal.SIGINT, 130, r"interrupted; ")
    for phase in (start[0], RUNNING):
        stuck = rf"no answer within step_timeout \({STEP_TIMEOUT} s\); "
        yield Fault(
            "stop rank", phase, "rank", signal.SIGSTOP, 3,
            stuck + r".*rank {rank} \(pid {pid}\) at {where} \(stopped by a signal\)",
        )  # fmt: skip
        yield Fault(
            "stop engine", phase, "engine", signal.SIGSTOP, 3,
            stuck + r"the engine \(pid {pid}\) at {engine_at} \(stopped by a signal\)$",
        )  # fmt: skip
        killed = r"the engine \(pid {pid}\) was killed by SIGKILL; it was at: {engine_at}$"
        yield Fault("kill engine", phase, "engine", signal.SIGKILL, 3, killed)
        yield Fault("kill parent", phase, "parent", signal.SIGKILL, -signal.SIGKILL, "")
    first = r"rank 0 \(pid {pid}\) was killed by SIGKILL; it was at: {where}$"
    yield Fault("kill rank 0", RUNNING, "rank 0", signal.SIGKILL, 3, first)
    raised = r"rank {rank} failed at {where}: ZeroDivisionError: as planned \(traceback: .*\)$"
    yield Fault("exception", RUNNING, "rank", None, 3, raised)


FAULT_NAMES = sorted({fault.name for fault in faults(graphs=True)})


def strike(fault: Fault, job: Job, *, tp: int) -> tuple[list[str], float, int]:
    """Start the job and have the fault end it: what was wrong, seconds from fault to end, exit code."""
    process = job.start(fault.phase)
    try:
        job.wait_for(fault.phase)
        engine, *ranks = descendants(process.pid)
        pid = {"parent": process.pid, "engine": engine, "rank 0": ranks[0], "rank": ranks[tp - 1]}[fault.victim]
        struck_at = time.monotonic()
        if fault.action is None:
            (job.folder / "raise").touch()
        else:
            os.kill(pid, fault.action)
        code = process.wait(fault.seconds + 10)
        seconds = time.monotonic() - struck_at
    finally:
        if process.poll() is None:
            job.end()
    wrong = [] if seconds <= fault.seconds else [f"it took more than {fault.seconds:g} s"]
    if code != fault.code:
        wrong.append(f"exit code {fault.code} was due")
    is_running = fault.phase == RUNNING
    pattern = fault.line.format(
        rank=tp - 1,
        pid=pid,
        where=r"(step \d+|waiting for a step)" if is_running else fault.phase,
        engine_at="running" if is_running else "start-up",
    )
    return wrong + wrong_lines(job.said(), pattern), seconds, code


def last_lines(said: str) -> list[str]:
    """Return the lines that say how a run ended."""
    return [line for line in said.splitlines() if re.match(r"nvcli: (error|interrupted)", line)]


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("nvcli: warning: ")]


def wrong_lines(said: str, pattern: str) -> list[str]:
    lines = last_lines(said)
    if len(lines) != (1 if pattern else 0) or not all(re.search(pattern, line) for line in lines):
        return [f"not one line with {pattern!r}: {lines}"]
    return ["there is a traceback"] if "Traceback" in said else []


def run_out_of_memory(
    job: Job, short: Sequence[str], long: Sequence[str], *, tp: int, device: str
) -> tuple[list[str], float, int]:
    """Take the last rank's memory once the `short` rows are answered; the `long` ones come then. As `strike`."""
    process = job.start(RUNNING)
    try:
        with exhaust_memory(device, tp - 1) as take:
            job.send(short)
            job.wait_for(RUNNING, len(short))
            take(descendants(process.pid)[tp])
            struck_at = time.monotonic()
            job.send(long)
            assert process.stdin is not None
            process.stdin.close()
            code = process.wait(WAIT_SECONDS)
    finally:
        if process.poll() is None:
            job.end()
    wrong = [] if code == 0 else ["exit code 0 was due"]
    lines = warnings(job.said())
    anew = r"Restarting all ranks took [\d.]+ s$" if tp > 1 else r"max_num_seqs [\d,]+$"
    pattern = rf"out of memory in step \d+ with [\d,]+ requests and [\d,]+ tokens \(rank {tp - 1}: .*{anew}"
    if not lines or not all(re.search(pattern, line) for line in lines):
        wrong.append(f"not a warning with {pattern!r}: {lines}")
    return wrong + wrong_lines(job.said(), ""), time.monotonic() - struck_at, code


def make_rows(rng: random.Random) -> list[str]:
    """Questions whose greedy answers leave no doubt: rounding must not decide. Short ones first."""
    prompts = [(f"What is {rng.randrange(10, 99)} + {rng.randrange(10, 99)}?\n", 8) for _ in range(8)]
    prompts += [(f"Count from {start} to {start + 12}.\n", 48) for start in rng.sample(range(10, 80), 24)]
    return [_row(prompt, max_tokens) for prompt, max_tokens in prompts]


def make_long_rows(rng: random.Random, count: int) -> list[str]:
    """Make rows of about 480 tokens: together more in a step than a graph was captured for."""
    questions = [question for _ in range(count) for question in sample_lookups(rng, 1, 60)]
    return [_row(raw_prompt(question), 8) for question in questions]


def _row(prompt: str, max_tokens: int) -> str:
    return json.dumps({"prompt": prompt, "sampling": {"temperature": 0, "max_tokens": max_tokens}}) + "\n"


class Loop:
    """Runs faults, and prints a row for each."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._tp: int = options.tp
        self._device: str = options.device
        settings = ["-m", options.model, "--tp", str(options.tp), "--progress", "none"]
        for setting in (
            f"device={options.device}",
            f"step_timeout={STEP_TIMEOUT}",
            "job.plan=false",
            "job.sync_seconds=0.1",
        ):
            settings += ["--set", setting]
        self._settings = settings
        # Few rows at a time, so that they finish one after the other.
        self._few = [*settings, "--set", "max_num_seqs=4"]
        self._rows = make_rows(random.Random(1))
        self._cut_short: list[tuple[str, Job]] = []
        self.failures: list[str] = []
        print(f"{'fault':14} {'phase':15} {'ended after':>11} {'exit':>5} {'rows':>5}  last line")

    def run(self, chosen: Sequence[Fault]) -> None:
        """Run each fault in a job of its own, which `finish` then finishes."""
        self._whole = self._untouched("whole", self._rows)
        for number, fault in enumerate(chosen):
            job = Job(self._folder / str(number), self._rows, self._few)
            self._check(fault.name, fault.phase, job, self._whole, partial(strike, fault, job, tp=self._tp))
            self._cut_short.append((f"{fault.name} at {fault.phase}", job))

    def run_out_of_memory(self) -> None:
        # A GPU's step of the small model must need more than what the taker of memory leaves.
        count, settings = 48, self._settings
        if self._device == "cuda":
            count, settings = 160, [*settings, "--set", "max_num_batched_tokens=65536"]
        short, long = self._rows[:8], make_long_rows(random.Random(2), count)
        expected = self._untouched("whole-memory", [*short, *long])
        job = Job(self._folder / "memory", None, settings)
        act = partial(run_out_of_memory, job, short, long, tp=self._tp, device=self._device)
        self._check(OUT_OF_MEMORY, RUNNING, job, expected, act)
        if job.answers() != expected:
            self._fail(OUT_OF_MEMORY, ["answers differ from those of a run that had enough"])

    def finish(self, *, num_at_once: int) -> None:
        """Finish all jobs that were cut short."""
        with ThreadPoolExecutor(num_at_once) as pool:
            codes = list(pool.map(lambda named: named[1].finish(), self._cut_short))
        equal = 0
        for (name, job), code in zip(self._cut_short, codes, strict=True):
            if code == 0 and job.answers() == self._whole:
                equal += 1
            else:
                self._fail(name, [f"not finished by the same command as an untouched job: exit code {code}"])
        print(f"{equal} of {len(codes)} jobs finished by the same command, with the answers of an untouched one")

    def _untouched(self, name: str, rows: Sequence[str]) -> dict[int, str]:
        job = Job(self._folder / name, rows, self._settings)
        if (code := job.finish()) != 0:
            raise SystemExit(f"the untouched run ended with {code}:\n{(job.folder / 'finish.txt').read_text()}")
        return job.answers()

    def _check(
        self, name: str, phase: str, job: Job, expected: dict[int, str], act: Callable[[], tuple[list[str], float, int]]
    ) -> None:
        before = Resources()
        try:
            wrong, seconds, code = act()
        except (FaultNotReached, subprocess.TimeoutExpired) as error:
            wrong, seconds, code = [str(error)], 0.0, 0
        left = before.left_by(job)
        job.end()
        answers = job.answers()
        said = job.said()
        line = next(iter(last_lines(said) or warnings(said)), "").removeprefix("nvcli: ")
        print(f"{name:14} {phase:15} {seconds:9.1f} s {code:5} {len(answers):5}  {line}", flush=True)
        if left:
            wrong.append(f"left behind: {', '.join(left)}")
        if not answers.items() <= expected.items():
            wrong.append("an answer differs from an untouched run's")
        self._fail(f"{name} at {phase}", wrong)

    def _fail(self, name: str, wrong: Sequence[str]) -> None:
        for what in wrong:
            print(f"  FAILED: {what}", flush=True)
            self.failures.append(f"{name}: {what}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tp", type=int, default=2)
    names = (*FAULT_NAMES, OUT_OF_MEMORY)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT", help=", ".join(names))


def run(options: argparse.Namespace) -> int:
    """Run the faults, and return the exit code."""
    started_at = time.monotonic()
    on_gpu = options.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="nvcli-faults-") as folder:
        loop = Loop(Path(folder), options)
        if chosen := [fault for fault in faults(graphs=on_gpu) if fault.name in options.only]:
            loop.run(chosen)
        if OUT_OF_MEMORY in options.only:
            loop.run_out_of_memory()
        loop.finish(num_at_once=max(2, (os.cpu_count() or 1) // 4))
    print(f"{len(loop.failures)} failures in {time.monotonic() - started_at:.0f} s")
    return 1 if loop.failures else 0
