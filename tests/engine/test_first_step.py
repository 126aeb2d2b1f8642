"""The first step of a job does not wait until all of its requests have come."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

import msgspec

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.client import EngineClient
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import _take_messages
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.protocol import AbortRequests, AddRequests, CloseEngine, ToEngine
from nvcli.engine.request import Request
from nvcli.engine.scheduler import Scheduler
from requests_factory import make_request


class SentMessages:
    """A process, with a socket that keeps the requests of each message."""

    def __init__(self) -> None:
        self.control = self
        self.messages: list[list[Request]] = []

    def send_bytes(self, data: bytes) -> None:
        message = msgspec.msgpack.decode(data, type=ToEngine)
        assert isinstance(message, AddRequests)
        self.messages.append(message.requests)


def sent(requests: list[Request]) -> list[list[Request]]:
    process: Any = SentMessages()
    EngineClient(process, step_timeout=1).add(requests)
    ids = [request.request_id for message in process.messages for request in message]
    assert ids == [request.request_id for request in requests]
    return [*process.messages]


def test_many_requests_are_sent_in_several_messages() -> None:
    short = [make_request(i, [1, 2, 3], 5) for i in range(1_000)]
    assert [len(message) for message in sent(short)] == [256, 256, 256, 232]
    long = [make_request(i, [1] * 50_000, 5) for i in range(8)]  # 200 kB each
    assert [len(message) for message in sent(long)] == [3, 3, 2]
    samples = [make_request(100 * i, [1, 2, 3], 5, n=100) for i in range(5)]
    assert [len(message) for message in sent(samples)] == [3, 2]
    assert [len(message) for message in sent(short[:256])] == [256]
    assert sent([]) == []


def make_core() -> tuple[EngineCore, Any]:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=4)
    executor: Any = None  # not asked while there is work
    return EngineCore(Scheduler(limits, BlockManager(100)), executor, max_in_flight=2), executor


def test_the_engine_takes_some_messages_and_runs_a_step_before_it_takes_more() -> None:
    core, executor = make_core()
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    late: deque[AddRequests] = deque()
    inbox.put(AddRequests([make_request(0, [1], 5, n=100)]))
    for first in (100, 200, 300):
        inbox.put(AddRequests([make_request(first + i, [1], 5) for i in range(100)]))
    assert _take_messages(inbox, late, core, executor, lambda message: None)
    assert core.scheduler.stats.num_waiting == 300
    assert _take_messages(inbox, late, core, executor, lambda message: None)
    assert core.scheduler.stats.num_waiting == 400
    assert not late


def test_what_is_no_request_does_not_wait_behind_requests() -> None:
    """An engine that has a large job before it ends at once, and ends requests that it has not looked at."""
    core, executor = make_core()
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    late: deque[AddRequests] = deque()
    for first in range(0, 1_000, 250):
        inbox.put(AddRequests([make_request(first + i, [1], 5) for i in range(250)]))
    inbox.put(AbortRequests([999]))
    assert _take_messages(inbox, late, core, executor, lambda message: None)
    assert [output.request_id for output in core.scheduler.take_outputs()] == [999]
    for first in range(1_000, 3_000, 250):
        inbox.put(AddRequests([make_request(first + i, [1], 5) for i in range(250)]))
    inbox.put(CloseEngine())
    assert not _take_messages(inbox, late, core, executor, lambda message: None)
    assert core.scheduler.stats.num_waiting == 1_000
