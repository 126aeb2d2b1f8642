"""The scheduler with pipeline stages: steps of disjoint requests in flight, each request's tokens in order, whatever
happens."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from combinations import seeds
from fake_runners import BLOCK_SIZE, HashingRunner, chunk_lens_of, decode_slots_of, engine_config, rows_of, spans_of
from nvcli.core.messages import StepInput, StepOutput, max_step_input_bytes, unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.worker.runner.interface import RankContext
from requests_factory import make_request


class StagedExecutor:
    """Runs steps at once, and holds their outputs back as stages would; checks what stages rely on.

    A step's decode rows come with the tokens that were chosen for them, and so none of them may be in a step whose
    output has not been collected.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        context = RankContext(rank=0, report_phase=lambda phase: None)
        self.runner = HashingRunner(engine_config(), context)
        self.steps: list[StepInput] = []
        self.pending: deque[tuple[set[int], StepOutput]] = deque()
        self.most_pending = 0

    def submit(self, step: StepInput) -> None:
        self.steps.append(step)
        assert len(msgspec.msgpack.encode(step)) <= max_step_input_bytes(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            max_blocks_per_seq=-(-self.limits.max_model_len // self.limits.block_size),
        )
        freed = set(unpack(step.freed_slots))
        for waiting, _ in self.pending:
            waiting -= freed  # they belong to other requests now
        decodes = decode_slots_of(step)
        assert not any(waiting & set(decodes) for waiting, _ in self.pending), "a request is in two steps in flight"
        assert len(decodes) <= -(-self.limits.max_num_seqs // self.limits.num_micro_batches)
        brought = {slot: (start, tokens) for slot, start, tokens in spans_of(step)}
        for slot in decodes:
            position = self.runner.lens[slot]
            assert brought[slot] == (position, [self.runner.tokens[slot][position]])
        output = self.runner.launch(step)
        assert output is not None
        self.pending.append(({slot for slot, _, num_logits in rows_of(step) if num_logits}, output.result()))
        self.most_pending = max(self.most_pending, len(self.pending))

    def collect(self) -> StepOutput:
        return self.pending.popleft()[1]


class AtOnce:
    """No stages: each step runs when it is submitted."""

    def __init__(self) -> None:
        context = RankContext(rank=0, report_phase=lambda phase: None)
        self.runner = HashingRunner(engine_config(), context)
        self.outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        assert not {slot for slot, _, _ in spans_of(step)} & set(decode_slots_of(step))
        output = self.runner.launch(step)
        assert output is not None
        self.outputs.append(output.result())

    def collect(self) -> StepOutput:
        return self.outputs.popleft()


def make_core(num_micro_batches: int, num_blocks: int = 64, **limits: int) -> tuple[EngineCore, StagedExecutor]:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": BLOCK_SIZE}
    scheduler_limits = SchedulerLimits(**{**values, **limits}, num_micro_batches=num_micro_batches)
    executor = StagedExecutor(scheduler_limits)
    scheduler = Scheduler(scheduler_limits, BlockManager(num_blocks))
    return EngineCore(scheduler, executor, max_in_flight=num_micro_batches), executor


def run(core: EngineCore, requests: list[Request]) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    core.add(requests)
    for _ in range(20_000):
        if not core.has_work:
            break
        for output in core.step():
            assert output.request_id not in done
            done[output.request_id] = output
        core._scheduler.check_integrity()
    assert not core.has_work, "the engine does not come to an end"
    assert core._scheduler.block_manager.num_used == 0
    return done


@pytest.mark.parametrize("num_micro_batches", [2, 3, 8])
def test_running_requests_are_dealt_out_to_the_steps_in_flight(num_micro_batches: int) -> None:
    core, executor = make_core(num_micro_batches, num_blocks=400, max_num_seqs=24, max_num_batched_tokens=128)
    done = run(core, [make_request(i, [i, 1, 2], 40) for i in range(24)])
    assert len(done) == 24
    assert executor.most_pending == num_micro_batches
    sizes = [step.num_decodes for step in executor.steps]
    full = sizes[num_micro_batches : -2 * num_micro_batches]
    assert set(full) == {24 // num_micro_batches}


def test_one_request_runs_alone() -> None:
    core, executor = make_core(2)
    done = run(core, [make_request(0, [1, 2, 3], 10)])
    assert len(unpack(done[0].token_ids)) == 10
    assert [step.num_decodes for step in executor.steps] == [0] + [1] * 9


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    core, executor = make_core(3, max_num_batched_tokens=8)
    done = run(core, [make_request(0, list(range(40)), 2)])
    assert len(unpack(done[0].token_ids)) == 2
    assert [chunk_lens_of(step) for step in executor.steps[:5]] == [[8]] * 5
    assert executor.most_pending == 3


def test_abort_while_a_step_is_in_flight() -> None:
    core, executor = make_core(2)
    core.add([make_request(i, [i, 1], 50) for i in range(4)])
    outputs = core.step() + core.step() + core.step()
    assert executor.pending
    core.abort([0, 3])
    while core.has_work:
        outputs += core.step()
        core._scheduler.check_integrity()
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == {0: "abort", 1: "length", 2: "length", 3: "abort"}


def answers(done: dict[int, RequestOutput]) -> dict[int, bytes]:
    return {number: output.token_ids for number, output in done.items() if output.finish_reason != "abort"}


@pytest.mark.parametrize("seed", seeds(24))
def test_random_jobs_are_answered_as_without_stages(seed: int) -> None:
    """Any mix of lengths, shared prefixes, chunks and tight memory. Each token depends on all before it."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(30))] for _ in range(3)]
    requests = []
    for number in range(50):
        prompt = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        stop_ids = [100 + rng.randrange(50)] if rng.random() < 0.5 else []
        requests.append(make_request(number, prompt, rng.randint(1, 30), stop_ids=stop_ids))
    limits = {"max_num_seqs": rng.randint(1, 12), "max_num_batched_tokens": rng.randint(12, 64)}
    num_blocks = rng.randint(24, 60)
    core, _ = make_core(rng.choice([2, 3, 4]), num_blocks, **limits)
    reference = EngineCore(
        Scheduler(SchedulerLimits(max_model_len=256, block_size=BLOCK_SIZE, **limits), BlockManager(400)),
        AtOnce(),
        max_in_flight=2,
    )
    expected: dict[int, bytes] = {}
    reference.add(requests)
    while reference.has_work:
        expected.update({output.request_id: output.token_ids for output in reference.step()})
    assert answers(run(core, requests)) == expected


@pytest.mark.parametrize("num_micro_batches", [2, 3])
def test_steps_in_flight_that_did_not_run_are_taken_back(num_micro_batches: int) -> None:
    def requests() -> list[Request]:
        return [make_request(i, list(range(i + 1, 2 * i + 12)), 20) for i in range(12)]

    expected = answers(run(make_core(num_micro_batches)[0], requests()))
    core, executor = make_core(num_micro_batches)
    done: dict[int, RequestOutput] = {}
    core.add(requests())
    while core.has_work:
        done.update({output.request_id: output for output in core.step()})
        if len(executor.steps) % 10 == 9 and core._in_flight:
            core._scheduler.put_back(list(core._in_flight))
            core._in_flight.clear()
            executor.pending.clear()
        core._scheduler.check_integrity()
    assert answers(done) == expected


@pytest.mark.parametrize("seed", range(10))
def test_random_arrivals_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    core, _ = make_core(rng.choice([2, 3]), rng.randint(10, 60), max_num_seqs=rng.randint(1, 12))
    added, done = 0, set()
    while added < 60 or core.has_work:
        for _ in range(rng.randrange(4) if added < 60 else 0):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            core.add([make_request(added, prompt, rng.randint(1, 30))])
            added += 1
        if added and rng.random() < 0.1:
            core.abort([rng.randrange(added)])
        for output in core.step():
            assert output.request_id not in done
            done.add(output.request_id)
        core._scheduler.check_integrity()
    assert done == set(range(added))
    assert core._scheduler.block_manager.num_used == 0
