"""Runs of the real command as `faults.py` treats them: their processes, their memory, and what they leave behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from nvcli.core.system.nvidia_smi import visible_gpus

RUNNING = "run"
"""The phase in which rows are being answered."""
END_SECONDS = 5.0
"""Seconds in which a run must end once a fault is noticed, and release all that it held."""
WAIT_SECONDS = 120.0
MARK = "NVCLI_FAULTS"
"""Environment variable by which a run's processes are found, whoever their parent is."""
GPU_SLACK = 64 << 20
"""Bytes; what the driver itself takes and gives back between two looks."""
MEMORY_SLACK = 16 << 20
"""Bytes that a rank is left with: enough for what is small, and for no step of thousands of tokens."""


class FaultNotReached(Exception):
    """The run ended, or went on for ever, before it came to where a fault was to strike."""


class Job:
    """A command in a folder of its own, with the brake of `fault_runner`, and the processes of its run."""

    def __init__(self, folder: Path, rows: Sequence[str] | None, settings: Sequence[str]) -> None:
        """`rows`: None: they come through a pipe, with `send`."""
        folder.mkdir()
        self.folder = folder
        self.output = folder / "out.jsonl"
        self._log = folder / "stderr.txt"
        self._source = "-"
        if rows is not None:
            (folder / "in.jsonl").write_text("".join(rows))
            self._source = str(folder / "in.jsonl")
        self._arguments = ["generate", self._source, "-o", str(self.output), *settings]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, phase: str) -> subprocess.Popen[bytes]:
        """Start it with the brake on, which halts it in `phase`."""
        script = str(Path(__file__).with_name("fault_runner.py"))
        environment = {
            **os.environ,
            MARK: str(self.folder),
            "FAULT_FOLDER": str(self.folder),
            "FAULT_PHASE": phase,
            "FAULT_STEP_SECONDS": "0.02",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, script, *self._arguments], env=environment, stdin=subprocess.PIPE, stderr=log
            )
        return self._process

    def send(self, rows: Sequence[str]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("".join(rows).encode())
        self._process.stdin.flush()

    def finish(self) -> int:
        """Run the same command without the brake, and return its exit code."""
        command = [sys.executable, "-P", "-m", "nvcli", *self._arguments]
        with (self.folder / "finish.txt").open("wb") as log:
            return subprocess.run(command, stderr=log, timeout=2 * WAIT_SECONDS, check=False).returncode

    def wait_for(self, phase: str, num_rows: int = 4) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (len(self.answers()) >= num_rows if phase == RUNNING else (self.folder / "reached").exists()):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise FaultNotReached(f"it did not come to {phase!r}:\n{self.said()}")
            time.sleep(0.005)

    def answers(self) -> dict[int, str]:
        """Return the choices of each row. A torn last line is left out."""
        if not self.output.exists():
            return {}
        lines = self.output.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["index"]: json.dumps(row["choices"]) for row in rows}

    def said(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        return marked_processes(str(self.folder))

    def end(self) -> None:
        """Kill what is left of the run."""
        own = self._process.pid if self._process is not None and self._process.poll() is None else None
        for pid in {*self.processes(), *([own, *descendants(own)] if own else [])}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()


def marked_processes(mark: str) -> list[int]:
    """Return the processes whose environment has this value of `MARK`."""
    entry = f"{MARK}={mark}".encode()
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if entry in _environment(pid)]


def descendants(pid: int) -> list[int]:
    """Return engines before their ranks. The process that renders chat templates is left out: no run ends with it."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    children = [
        int(child)
        for task in tasks
        for child in _text_of(f"/proc/{pid}/task/{task}/children").split()
        if not any("chat_renderer" in _text_of(f"/proc/{child}/{name}") for name in ("cmdline", "comm"))
    ]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def _text_of(path: str) -> str:
    """Return what /proc says of a thread or process; nothing of one that has ended, which others outlive."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _environment(pid: int) -> list[bytes]:
    """Return the variables of a process; none of one that is gone, a zombie, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Resources:
    """Memory and GPUs in use, to compare with after a run."""

    def __init__(self) -> None:
        self._shm = set(os.listdir("/dev/shm"))
        self._gpus = _used_gpu_bytes()

    def left_by(self, job: Job) -> list[str]:
        """Return what a run has left behind, after END_SECONDS to go."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self._left_by(job)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left_by(self, job: Job) -> list[str]:
        left = [f"process {pid}" for pid in job.processes()]
        left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - self._shm)]
        if self._gpus:
            for index, used in _used_gpu_bytes().items():
                more = used - self._gpus.get(index, 0)
                if more > GPU_SLACK:
                    left.append(f"{more >> 20} MiB of GPU {index}")
        return left


def _used_gpu_bytes() -> dict[int, int]:
    """Return the memory in use of each GPU that a run sees, by the driver's numbers; empty where there are none."""
    gpus = visible_gpus()
    return {} if isinstance(gpus, str) else {gpu.index: gpu.used_bytes for gpu in gpus}


@contextmanager
def exhaust_memory(device: str, gpu: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the memory of a rank, given its process id. What it took is given back in the end.

    On a GPU another process takes what is free on `gpu`, the rank's by the numbers that a process sees. On a CPU the
    kernel is told to give the rank's process no more.
    """
    if device == "cpu":
        yield _limit_memory
        return
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    taker = spawn.Process(target=_take_gpu_memory, args=(gpu, there), daemon=True)
    taker.start()

    def take(pid: int) -> None:
        here.send("take")
        assert here.recv() == "taken"

    try:
        assert here.recv() == "ready"  # this takes seconds, so that taking the memory takes none
        yield take
    finally:
        taker.kill()


def _limit_memory(pid: int) -> None:
    used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert used is not None
    limit = int(used[1]) * 1024 + MEMORY_SLACK
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


def _take_gpu_memory(gpu: int, control: Connection) -> None:
    """Take what is free once a message comes, and keep it until this process ends."""
    import torch

    device = torch.device("cuda", gpu)
    torch.zeros(1, device=device)
    control.send("ready")
    control.recv()
    taken = []
    size = 1 << 40
    while size >= 2 << 20:
        size = min(size, torch.cuda.mem_get_info(device)[0] - MEMORY_SLACK)
        try:
            taken.append(torch.empty(max(size, 0), dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    control.send("taken")
    control.recv()
