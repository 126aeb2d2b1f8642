"""How the end of a child is described: what the kernel killed for want of memory is said to be that, and no other."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import pytest

from nvcli.control_group import OomKills
from nvcli.executor import child_process
from nvcli.executor.child_process import ChildProcess


def wait(_: None, control: Connection) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (1, 2, "memory ran out: meanwhile the kernel's out-of-memory killer ended 1 process of this machine. Free or"),
        (0, 3, "likely because memory ran out: meanwhile the kernel's out-of-memory killer ended 3 processes of"),
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
