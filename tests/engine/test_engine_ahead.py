"""An engine that is started before its configuration is known, with the process of a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.engine.client import EngineClient
from nvcli.engine.request import RequestOutput
from nvcli.worker.executor.child_process import ChildProcess
from requests_factory import make_request


def children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:
        return []


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def engine() -> Iterator[ChildProcess]:
    process = ChildProcess("nvcli.engine.engine_ahead:main", None, name="engine")
    wait_until(lambda: children(process.pid))
    yield process
    process.close(has_children=True)


def test_the_rank_that_is_there_is_used(engine: ChildProcess) -> None:
    (rank,) = children(engine.pid)
    client = EngineClient.start(engine_config(), process=engine, runner="fake_runners:CountingRunner")
    try:
        client.wait_ready()
        assert children(engine.pid) == [rank]
        client.add([make_request(0, [1, 2, 3], 5)])
        answers: list[RequestOutput] = []
        wait_until(lambda: answers.extend(client.poll(0.1)) or answers)
        assert unpack(answers[0].token_ids).tolist() == list(range(100, 105))
    finally:
        client.close()
    assert is_gone(rank)


def test_several_ranks_are_started_anew(engine: ChildProcess) -> None:
    (rank,) = children(engine.pid)
    config = engine_config(tensor_parallel_size=2)
    client = EngineClient.start(config, process=engine, runner="fake_runners:CountingRunner")
    try:
        client.wait_ready()
        assert is_gone(rank)
        assert len(children(engine.pid)) == 2
    finally:
        client.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_that_is_not_used_leaves_nothing(engine: ChildProcess, is_told: bool) -> None:
    """It is told so, or its parent is gone."""
    (rank,) = children(engine.pid)
    if is_told:
        engine.close(has_children=True)
    else:
        engine.control.close()
        wait_until(lambda: is_gone(engine.pid))
    wait_until(lambda: is_gone(rank))
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)  # not even in the process table
