"""Requests of adapters that are merged into the weights in turn: how their tails go on."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from nvcli.core.messages import unpack
from nvcli.engine import merged_adapter
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import StepDraft
from rank_in_process import RankInProcess, make_core
from requests_factory import make_request

SLOTS = 8
LIMITS = SchedulerLimits(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=64,
    max_model_len=64,
    block_size=4,
    max_loaded_adapters=3,
    merged_adapters=(1, 2, 3),
)


def run(num_blocks: int, per_adapter: int) -> tuple[int, int]:
    """The number of steps in which requests have adapters of their own, and of tokens that were computed again."""
    rng = random.Random(0)
    requests = [
        make_request(i, [rng.randrange(50) for _ in range(9)], rng.randint(4, 24), adapter=1 + i // per_adapter)
        for i in range(3 * per_adapter)
    ]
    rank = RankInProcess(LIMITS)
    core, scheduler = make_core(LIMITS, rank, num_blocks=num_blocks, max_in_flight=1)
    core.scheduler.add(requests)
    while core.has_work:
        core.step()
        scheduler.check_integrity()
    needed = sum(len(unpack(request.prompt_ids)) + request.max_tokens - 1 for request in requests)
    return sum(step.has_adapters for step in rank.ran), sum(step.total_tokens for step in rank.ran) - needed


def test_tails_rest_while_the_next_group_runs() -> None:
    """Then they run together, and nothing is computed again."""
    num_steps, num_again = run(num_blocks=400, per_adapter=SLOTS)
    assert num_again == 0
    assert num_steps < 25


def test_requests_rest_on_where_no_row_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if drafts in flight held the blocks that rows need: no step comes then."""
    plan, num_plans = Scheduler._plan_decode_rows, itertools.count()

    def plan_some(self: Scheduler, draft: StepDraft, *, has_prompts: bool) -> tuple[list[RequestState], list[int]]:
        return plan(self, draft, has_prompts=has_prompts) if next(num_plans) % 2 else ([], [])

    monkeypatch.setattr(Scheduler, "_plan_decode_rows", plan_some)
    assert run(num_blocks=400, per_adapter=SLOTS)[1] == 0


def test_without_memory_tails_run_beside_the_next_group() -> None:
    num_steps, num_again = run(num_blocks=70, per_adapter=SLOTS)
    assert num_again == 0
    assert num_steps > 40


def test_no_request_rests_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests of another adapter come and come."""
    monkeypatch.setattr(merged_adapter, "_MOST_REST", 40)
    requests = [make_request(i, [i % 50], 24, adapter=1 if i < SLOTS else 2) for i in range(20 * SLOTS)]
    requests = [msgspec.structs.replace(each, max_tokens=10 + each.request_id % 9) for each in requests]
    core, _ = make_core(LIMITS, RankInProcess(LIMITS), num_blocks=400, max_in_flight=1)
    core.scheduler.add(requests)
    ended: list[int] = []
    while core.has_work:
        ended += [output.request_id for output in core.step() if output.finish_reason is not None]
    assert max(map(ended.index, range(SLOTS))) < len(requests) / 2


def test_resting_requests_give_up_blocks_that_others_need() -> None:
    assert run(num_blocks=48, per_adapter=3 * SLOTS)[1] > 0
