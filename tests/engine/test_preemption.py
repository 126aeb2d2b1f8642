"""Who gives way when blocks run out: those who were admitted last, and members of a group after others."""

from __future__ import annotations

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from requests_factory import make_request

ALONE = [[100 + i] * 9 for i in range(4)]
GROUP = [[*range(8), 50 + i] for i in range(3)]


def victim_of(prompts: list[list[int]]) -> int:
    """The number of the victim among requests that were admitted in this order."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=200, max_model_len=64, block_size=4)
    scheduler = Scheduler(limits, BlockManager(100))
    scheduler.add(make_request(i, prompt, 20) for i, prompt in enumerate(prompts))
    assert scheduler.schedule() is not None
    assert scheduler.stats.num_running == len(prompts)
    return scheduler._running.choose_victim(0).request.request_id


def test_without_groups_it_is_the_request_admitted_last() -> None:
    assert victim_of(ALONE) == 3


def test_members_of_a_group_stay() -> None:
    assert victim_of([*ALONE, *GROUP[:2]]) == 3
    assert victim_of([ALONE[0], GROUP[0], ALONE[1], GROUP[1]]) == 2
    assert victim_of([*ALONE, GROUP[0]]) == 4, "a group of one is no group"


def test_the_earlier_half_stays() -> None:
    assert victim_of([*ALONE[:2], *GROUP]) == 4
