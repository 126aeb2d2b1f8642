"""The last words of an engine reach the parent, and those of its ranks, where a benchmark asks for them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.engine.client import EngineClient
from nvcli.errors import WorkerError
from requests_factory import answers_of, make_request


def test_finish_gives_every_ranks_peak_memory() -> None:
    config = engine_config(tensor_parallel_size=2, record_steps=True)
    client = EngineClient.start(config, runner="fake_runners:CountingRunner")
    try:
        client.wait_ready()
        client.add([make_request(0, [1, 2, 3], 5)])
        deadline = time.monotonic() + 30
        while not client.poll(0.1):
            assert time.monotonic() < deadline
        assert len(client.take_steps()) == 5
        assert client.finish() == [1000, 1001]
    finally:
        client.close()


def test_answers_that_came_before_an_engine_died_are_not_lost() -> None:
    client = EngineClient.start(engine_config(), runner="fake_runners:CountingRunner")
    try:
        client.wait_ready()
        client.add([make_request(number, [1, 2, 3], 5) for number in range(4)])
        answers = client.poll(30)
        client.add([make_request(4 + number, [1, 2, 3], 5) for number in range(4)])
        time.sleep(1.0)  # they are answered, and wait to be read
        os.kill(client.pid, signal.SIGKILL)
        time.sleep(0.2)
        client.add([make_request(8, [1, 2, 3], 5)])
        answers += client.poll(0)
        assert sorted(answer.request_id for answer in answers) == list(range(8))
        assert all(unpack(answer.token_ids).tolist() == list(range(100, 105)) for answer in answers)
        for _ in range(2):
            with pytest.raises(WorkerError, match="was killed by SIGKILL"):
                client.poll(0)
    finally:
        client.close()


def test_the_scheduler_keeps_to_the_kv_groups_of_the_ranks() -> None:
    """A window's blocks are freed, so that requests run beside one another; the rank checks all that it reads."""

    def answers(runner: str) -> dict[int, list[int]]:
        client = EngineClient.start(engine_config(), runner=f"fake_runners:{runner}")
        try:
            client.wait_ready()
            done = answers_of(client, [make_request(i, range(i, i + 30), 40) for i in range(12)])
        finally:
            client.close()
        return {number: unpack(output.token_ids).tolist() for number, output in done.items()}

    assert answers("WindowedRunner") == answers("HashingRunner")
