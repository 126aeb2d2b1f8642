"""The last words of an engine's ranks reach the parent, where a benchmark asks for them."""

from __future__ import annotations

import time

from fake_runners import engine_config
from nvcli.engine.client import EngineClient
from requests_factory import make_request


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
