"""The processes that make masks cannot start: the rank says why, and nothing else is printed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constrained_requests import load_vocabulary

from nvcli.demo import demo_path
from nvcli.errors import WorkerError
from nvcli.grammars import grammar_of
from nvcli.runner import mask_workers
from nvcli.runner.mask_messages import WantMask, answered
from nvcli.runner.mask_workers import MaskWorkers, Patience
from nvcli.structured import Structured

FAILING = """
import {module} as module
from nvcli.runner import mask_worker
def fail(*args, **kwargs): raise {error}
module.{name} = fail
mask_worker.main()
"""


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("os", "fork", "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("os", "ftruncate", "MemoryError('no room')"),
        ("threading", "Thread", "RuntimeError('no more threads')"),
    ],
)
def test_what_fails_at_the_start_is_said(
    module: str, name: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = tmp_path / "stderr"
    start = subprocess.Popen

    def start_failing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = FAILING.format(module=module, name=name, error=error)
        with printed.open("w") as stderr:
            return start([command[0], "-P", "-c", code, command[-1]], stderr=stderr, **options)

    monkeypatch.setattr(mask_workers.subprocess, "Popen", start_failing)
    workers = MaskWorkers(demo_path(), vocab_size=640, end_ids=[0], num_rows=4, num_workers=2, stays_awake=False)

    def follow() -> None:
        """Begin as a rank does. What fails once the tokens are loaded is found when masks are waited for."""
        workers.wait_ready()
        workers._check(10.0)

    with pytest.raises(WorkerError, match=error.split("(")[0]):
        follow()
    assert printed.read_text() == ""


NINES = grammar_of(Structured(regex="9*"))


def begin_answers(num_rows: int) -> tuple[MaskWorkers, np.ndarray]:
    """Begin answers of nines in two processes, and wait for their first masks."""
    workers = MaskWorkers(demo_path(), vocab_size=640, end_ids=[0], num_rows=num_rows, num_workers=2, stays_awake=True)
    workers.wait_ready()
    rows = np.array([workers.begin(NINES) for _ in range(num_rows)])
    for row in rows.tolist():
        workers.want(WantMask(row, 1, [], is_free=False, held_back=[], opening=None, is_opened=False))
    workers.send()
    workers.wait(rows, answered(np.ones(num_rows, dtype=np.int64), has_failed=False), num_rows, None)
    return workers, rows


@pytest.fixture(scope="module")
def nine() -> int:
    (token,) = load_vocabulary().tokenizer.greedy_tokenize("9")
    return token


def ask(workers: MaskWorkers, rows: np.ndarray, number: int, token: int) -> np.ndarray:
    """Ask for masks behind one more token. Returns what is there once they are made."""
    numbers = np.full(len(rows), number)
    workers.want_next(rows, numbers, np.full(len(rows), token))
    workers.send()
    return answered(numbers, has_failed=False)


def test_only_processes_that_are_asleep_get_a_message_for_what_is_in_the_memory(
    nine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, rows = begin_answers(4)
    written: list[int] = []
    write = workers._write

    def note_and_write(fd: int, data: bytes) -> None:
        written.append(fd)
        write(fd, data)

    deadline = time.monotonic() + 60
    while not workers._table.is_asleep[:2].all() and time.monotonic() < deadline:
        workers._check(0.001)
    monkeypatch.setattr(workers, "_write", note_and_write)
    for number in range(2, 200):
        wanted = ask(workers, rows, number, nine)
        workers.wait(rows, wanted, len(rows), None)
        assert (workers.answered[rows] == wanted).all()
        if number == 2:
            assert sorted(written) == sorted(workers._order_fds)
    assert len(written) < 100


def test_a_process_that_is_killed_is_missed_by_steps_that_go_on_without_masks(nine: int) -> None:
    """Steps with other rows never wait for long."""
    workers, rows = begin_answers(4)
    children = Path(f"/proc/{workers._process.pid}/task/{workers._process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    workers._process.wait(60)

    def go_on() -> None:
        wanted = ask(workers, rows, 2, nine)  # that fails at once where a process was asleep
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            workers.wait(rows, wanted, 2 * len(rows), Patience(time.perf_counter(), 0.001))

    with pytest.raises(WorkerError, match="has failed"):
        go_on()
