"""What the scheduler does for a request does not grow with the prefix that is in the cache, but for a few plain loops.

Time is not measured, which other work on the machine would disturb, but counted in calls of functions.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import pytest

from nvcli.core.messages import pack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import BlockTables
from nvcli.engine.core import EngineCore
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.engine.step_draft import StepDraft, _pack_blocks
from nvcli.engine.step_recorder import StepRecorder
from requests_factory import make_request
from scheduler_engine import InstantExecutor

LIMITS = SchedulerLimits(
    max_num_seqs=300,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    block_size=16,
    segment_costs=SegmentCosts(),
    plans_admission=True,
)


def count_calls(work: Callable[[], object]) -> int:
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls


def calls_of_an_admitting_step(num_shared: int, num_requests: int = 64) -> float:
    """Count the calls for each of the requests that a step admits, which share so many cached tokens."""
    recorder = StepRecorder(LIMITS)
    core = EngineCore(Scheduler(LIMITS, BlockManager(4000)), InstantExecutor(), max_in_flight=1, recorder=recorder)
    prefix = [index % 97 for index in range(num_shared)]
    core.scheduler.add([make_request(0, [*prefix, 5], 100)])
    core.step()
    core.scheduler.add([make_request(i, [*prefix, *[1000 + i] * 20], 100) for i in range(1, num_requests + 1)])
    num_calls = count_calls(core.step)
    num_calls += count_calls(core.step)  # in which they decode
    assert core.scheduler.stats.num_running == num_requests + 1
    assert core.scheduler.stats.cached_tokens == num_shared * num_requests
    return num_calls / num_requests


def test_a_long_cached_prefix_takes_hardly_more_calls_than_a_short_one() -> None:
    num_blocks_more = (2048 - 16) // 16
    assert calls_of_an_admitting_step(2048) - calls_of_an_admitting_step(16) < 1.5 * num_blocks_more


@pytest.mark.parametrize("num_shared", [16, 2048])
def test_a_request_takes_no_more_calls_where_many_share_its_prefix(num_shared: int) -> None:
    """A short prefix is not worth being read once for all, and a long one is."""
    few, many = (calls_of_an_admitting_step(num_shared, num_requests) for num_requests in (32, 256))
    assert many < 1.1 * few


def test_a_block_for_a_long_request_takes_no_more_than_one_for_a_short_one() -> None:
    tables = BlockTables(BlockManager(10), LIMITS)

    def peak_bytes(column: int) -> int:
        draft = StepDraft(LIMITS)
        draft.add_blocks(0, 3, column, [5])
        tracemalloc.start()
        try:
            step = draft.finish(
                0,
                decoding=[],
                decode_slots=pack([3]),
                decode_widths=[1],
                decode_lens=pack([column * 16 + 1]),
                registered=[],
                **tables.share(draft, 1),
            )
            assert step.input.block_columns == pack([column])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # what is made once
    assert peak_bytes(100_000) < peak_bytes(1) + 1_000


def test_blocks_reach_the_ranks_in_the_order_in_which_they_were_given() -> None:
    """Single blocks and runs of them, beside one another."""
    rng = random.Random(0)
    for _ in range(100):
        runs = [
            (
                rng.randrange(3),
                rng.randrange(9),
                rng.randrange(50),
                [rng.randint(1, 99) for _ in range(rng.randrange(4))],
            )
            for _ in range(rng.randrange(6))
        ]
        entries = [
            (group, slot, column, block)
            for group, slot, first, blocks in runs
            for column, block in enumerate(blocks, first)
        ]
        expected = [pack(column) for column in zip(*entries, strict=True)] if entries else [b""] * 4
        assert _pack_blocks(runs) == expected
