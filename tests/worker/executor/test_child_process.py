"""How the end of a child is described: what the kernel killed for want of memory is said to be that, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection

import pytest

from nvcli.core.system.control_group import OomKills
from nvcli.worker.executor import child_process
from nvcli.worker.executor.child_process import ChildProcess


def wait(_: None, control: Connection) -> None:
    time.sleep(60)


def run_another(_: None, control: Connection) -> None:
    """Start a process that inherits what it may, as Triton starts compilers."""
    with subprocess.Popen(["sleep", "60"], close_fds=False) as other:
        control.send(other.pid)
        other.wait()


def test_the_end_of_a_child_is_noticed_while_processes_of_its_own_live() -> None:
    child = ChildProcess(f"{__name__}:run_another", None, name="rank 0")
    pid = child.control.recv()
    try:
        child.kill()
        assert child.control.poll(20)
        with pytest.raises(EOFError):
            child.control.recv()
        os.kill(pid, 0)  # it lives
    finally:
        os.kill(pid, signal.SIGKILL)
        child.close()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (1, 2, "memory ran out: the kernel's out-of-memory killer ended 1 process of this machine meanwhile. Free or"),
        (0, 3, "probably because memory ran out: the kernel's out-of-memory killer ended 3 processes of"),
        (4, 4, None),
        (None, None, None),
    ],
)
def test_a_killed_child(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, told: str | None
) -> None:
    counts = iter([before, after])

    def count() -> OomKills | None:
        number = next(counts)
        return None if number is None else OomKills(count=number, where="this machine")

    monkeypatch.setattr(child_process, "count_oom_kills", count)
    child = ChildProcess(f"{__name__}:wait", None, name="rank 0")
    child.kill()
    try:
        text = child.describe_exit()
    finally:
        child.close()
    assert text.startswith("was killed by SIGKILL")
    assert text == "was killed by SIGKILL" if told is None else told in text


def test_a_child_that_ended_by_itself_is_not_laid_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([OomKills(count=0, where="this machine"), OomKills(count=1, where="this machine")])
    monkeypatch.setattr(child_process, "count_oom_kills", lambda: next(counts))
    child = ChildProcess("sys:exit", None, name="rank 0")  # `sys.exit` takes one argument: a TypeError, and code 1
    try:
        assert child.describe_exit(timeout=20) == "exited with code 1"
    finally:
        child.close()
