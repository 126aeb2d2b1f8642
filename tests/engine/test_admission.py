"""Requests are admitted as far as they fit to their ends: hardly any is preempted, and slots are not left empty."""

from __future__ import annotations

import random
from collections import deque

import pytest

from combinations import full
from nvcli.core.messages import KVGroup, StepInput, StepOutput, pack, unpack
from nvcli.engine.admission import Admission
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import BlockTables
from nvcli.engine.core import EngineCore
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.state import Prompt, RequestState
from requests_factory import make_request

STOP_ID = 9


def make_limits(**fields: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
        "block_size": 16,
        "plans_admission": True,
    }
    return SchedulerLimits(**{**values, **fields})  # type: ignore[arg-type]


class EndingExecutor:
    """Ends the answer of each row at the length that was set for it."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.ends: dict[int, int] = {}
        self.outputs: deque[StepOutput] = deque()
        self.num_tokens = 0

    def submit(self, step: StepInput) -> None:
        for new in step.new_slots:
            self.ends[new.slot] = new.sampling.prompt_len + self.lengths[new.sampling.row]
        rows = zip(unpack(step.slots), unpack(step.num_logits), unpack(step.seq_lens), strict=True)
        tokens = [STOP_ID if length + 1 >= self.ends[slot] else 5 for slot, logits, length in rows if logits]
        self.num_tokens += step.total_tokens
        self.outputs.append(StepOutput(step_id=step.step_id, token_ids=pack(tokens)))

    def collect(self) -> StepOutput:
        return self.outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        raise AssertionError("no step runs out of memory")


def run(
    requests: list[Request], lengths: list[int], limits: SchedulerLimits, num_blocks: int
) -> tuple[Scheduler, EndingExecutor, int]:
    """Answer all requests. The scheduler, the executor, and the number of steps."""
    executor = EndingExecutor(lengths)
    scheduler = Scheduler(limits, BlockManager(num_blocks))
    core = EngineCore(scheduler, executor, max_in_flight=2)
    core.scheduler.add(requests)
    num_steps = num_answers = 0
    while core.has_work:
        num_answers += len(core.step())
        num_steps += 1
        if num_steps % 16 == 0:
            scheduler.check_integrity()
    assert num_answers == len(requests)
    assert scheduler.block_manager.num_used == 0
    return scheduler, executor, num_steps


def some_requests(rng: random.Random, number: int, max_tokens: int, **fields: object) -> list[Request]:
    return [
        make_request(i, [rng.randrange(100) for _ in range(rng.randint(5, 60))], max_tokens, **fields)
        for i in range(number)
    ]


@pytest.mark.parametrize(("mean", "num_blocks"), [(250, 400), full((400, 800), in_parts=True)])
def test_few_requests_are_preempted_and_the_job_takes_hardly_more_steps(mean: int, num_blocks: int) -> None:
    """The cache holds about 20 to 30 requests, in 64 slots. The lengths of so few are hard to foresee."""
    rng = random.Random(1)
    requests = some_requests(rng, 400, 3000, stop_ids=[STOP_ID])
    lengths = [min(3000, 1 + int(rng.expovariate(1 / mean))) for _ in requests]
    planned, executor, num_steps = run(requests, lengths, make_limits(), num_blocks)
    greedy, greedy_executor, num_greedy_steps = run(requests, lengths, make_limits(plans_admission=False), num_blocks)
    assert greedy.stats.num_preemptions > 200
    assert planned.stats.num_preemptions < greedy.stats.num_preemptions / 2.5
    assert executor.num_tokens < 0.9 * greedy_executor.num_tokens, "less is computed again"
    assert num_steps < 1.15 * num_greedy_steps


@pytest.mark.parametrize(
    "groups", [(KVGroup(),), (KVGroup(window=4096),), (KVGroup(window=5000), KVGroup(), KVGroup(window=4096))]
)
def test_requests_of_certain_length_are_never_preempted(groups: tuple[KVGroup, ...]) -> None:
    """Windows that no request outgrows hold as much as full attention."""
    rng = random.Random(2)
    requests = some_requests(rng, 200, 300)
    lengths = [10_000] * len(requests)  # max_tokens ends them
    scheduler, _, _ = run(requests, lengths, make_limits(kv_groups=groups), 400 * len(groups))
    assert scheduler.stats.num_preemptions == 0


def test_slots_are_full_where_the_cache_is_large_enough() -> None:
    rng = random.Random(3)
    requests = some_requests(rng, 300, 4000, stop_ids=[STOP_ID])
    lengths = [rng.randint(20, 80) for _ in requests]
    _, _, num_steps = run(requests, lengths, make_limits(), 64 * 10)
    _, _, num_greedy_steps = run(requests, lengths, make_limits(plans_admission=False), 64 * 10)
    assert num_steps < 1.06 * num_greedy_steps, "though 64 answers of 4,000 tokens would not fit"


@pytest.mark.parametrize("groups", [(KVGroup(), KVGroup(window=40)), (KVGroup(window=40),)])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_windows_and_stages(groups: tuple[KVGroup, ...], num_micro_batches: int) -> None:
    rng = random.Random(4)
    requests = some_requests(rng, 80, 200, stop_ids=[STOP_ID])
    lengths = [rng.randint(20, 180) for _ in requests]
    limits = make_limits(kv_groups=groups, num_micro_batches=num_micro_batches)
    run(requests, lengths, limits, 200)


def test_a_lone_request_is_admitted_whatever_is_forecast() -> None:
    """Its answer may be shorter than its max_tokens, which would not fit."""
    requests = [make_request(0, range(30), 3000, stop_ids=[STOP_ID]), make_request(1, range(40), 3000)]
    scheduler, _, _ = run(requests[:1], [50], make_limits(), 10)
    assert scheduler.stats.generated_tokens == 50


def test_a_request_that_did_not_fit_is_looked_at_again_when_one_has_ended_or_after_a_while() -> None:
    limits = make_limits()
    admission = Admission(limits)
    tables = BlockTables(BlockManager(60), limits)
    matches: list[int] = []
    find = tables.block_manager.find_leading
    tables.block_manager.find_leading = lambda *args: matches.append(1) or find(*args)  # type: ignore[method-assign, func-returns-value]
    first, second = (
        RequestState(request, Prompt(request))
        for request in (make_request(0, range(40), 500), make_request(1, range(50, 99), 500))
    )
    assert admission.enter(first, tables, 100, 0) == 40
    for step, is_looked_at in ((1, True), (2, False), (30, False), (40, True), (41, False)):
        matches.clear()
        assert admission.enter(second, tables, 100, step) is None
        assert (len(matches) > 0) == is_looked_at, step
        assert second.blocks == []
    admission.check_integrity([first])
    tables.release(first)
    admission.leave(first)
    assert admission.enter(second, tables, 100, 42) == 49
    admission.check_integrity([second])
