"""Which home a request gets, where each rank keeps the keys of other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nvcli.core.messages import unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from requests_factory import make_request

LIMITS = SchedulerLimits(max_num_seqs=24, max_num_batched_tokens=96, max_model_len=96, block_size=4, num_homes=3)


def homes_of(prompts: Sequence[list[int]], num_blocks: int = 100) -> tuple[list[int], Scheduler]:
    """The home of each request, in the order in which they enter, one in a step."""
    scheduler = Scheduler(LIMITS, BlockManager(num_blocks))
    homes = []
    for number, prompt in enumerate(prompts):
        scheduler.add([make_request(number, prompt, 20)])
        step = scheduler.schedule()
        assert step is not None
        homes += [new.slot % 3 for new in step.input.new_slots]
        scheduler.check_integrity()
    return homes, scheduler


def test_the_home_with_the_most_free_blocks_is_chosen() -> None:
    homes, _ = homes_of([[1] * 30, [2] * 8, [3] * 8, [4] * 8])
    assert homes == [0, 1, 2, 1]


def test_the_home_that_holds_the_beginning_is_chosen() -> None:
    homes, scheduler = homes_of([[1] * 24, [2] * 8, [3] * 8, [1] * 20 + [5] * 4])
    assert homes == [0, 1, 2, 0]
    assert scheduler.stats.cached_tokens == 20


def test_prompts_that_all_begin_alike_are_spread_evenly() -> None:
    """Each home computes the beginning once."""
    homes, scheduler = homes_of([[1] * 20 + [number] * 4 for number in range(18)])
    assert max(Counter(homes).values()) <= 8
    assert min(Counter(homes).values()) >= 5
    assert scheduler.stats.cached_tokens == 15 * 20


def test_a_step_takes_no_more_tokens_for_a_home_than_its_share() -> None:
    scheduler = Scheduler(LIMITS, BlockManager(100))
    scheduler.add([make_request(number, [number] * 50, 20) for number in range(4)])
    step = scheduler.schedule()
    assert step is not None
    assert sorted(unpack(step.input.num_tokens)) == [32, 32, 32]
