"""The scheduler with pipeline stages: steps of disjoint requests in flight, each request's tokens in order. Random
jobs are in `test_random_engine.py`."""

from __future__ import annotations

import pytest

from fake_runners import BLOCK_SIZE, chunk_lens_of
from nvcli.core.messages import unpack
from nvcli.engine.core import EngineCore
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from rank_in_process import RankInProcess, run
from rank_in_process import make_core as make_core_of
from requests_factory import make_request


def make_core(
    num_micro_batches: int, num_blocks: int = 64, **limits: int
) -> tuple[EngineCore, Scheduler, RankInProcess]:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": BLOCK_SIZE}
    scheduler_limits = SchedulerLimits(**{**values, **limits}, num_micro_batches=num_micro_batches)
    rank = RankInProcess(scheduler_limits)
    return *make_core_of(scheduler_limits, rank, num_blocks=num_blocks, max_in_flight=num_micro_batches), rank


def answer(core: EngineCore, scheduler: Scheduler, requests: list[Request]) -> dict[int, RequestOutput]:
    core.scheduler.add(requests)
    return run(core, scheduler)


@pytest.mark.parametrize("num_micro_batches", [2, 3, 8])
def test_running_requests_are_dealt_out_to_the_steps_in_flight(num_micro_batches: int) -> None:
    core, scheduler, rank = make_core(num_micro_batches, num_blocks=400, max_num_seqs=24, max_num_batched_tokens=128)
    done = answer(core, scheduler, [make_request(i, [i, 1, 2], 40) for i in range(24)])
    assert len(done) == 24
    assert rank.most_outputs == num_micro_batches
    sizes = [step.num_decodes for step in rank.steps]
    full = sizes[num_micro_batches : -2 * num_micro_batches]
    assert set(full) == {24 // num_micro_batches}


def test_one_request_runs_alone() -> None:
    core, scheduler, rank = make_core(2)
    done = answer(core, scheduler, [make_request(0, [1, 2, 3], 10)])
    assert len(unpack(done[0].token_ids)) == 10
    assert [step.num_decodes for step in rank.steps] == [0] + [1] * 9


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    core, scheduler, rank = make_core(3, max_num_batched_tokens=8)
    done = answer(core, scheduler, [make_request(0, list(range(40)), 2)])
    assert len(unpack(done[0].token_ids)) == 2
    assert [chunk_lens_of(step) for step in rank.steps[:5]] == [[8]] * 5
    assert rank.most_outputs == 3


def test_abort_while_a_step_is_in_flight() -> None:
    core, scheduler, rank = make_core(2)
    core.scheduler.add([make_request(i, [i, 1], 50) for i in range(4)])
    outputs = core.step() + core.step() + core.step()
    assert rank.outputs
    core.scheduler.abort([0, 3])
    while core.has_work:
        outputs += core.step()
        scheduler.check_integrity()
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == {0: "abort", 1: "length", 2: "length", 3: "abort"}


def answers(done: dict[int, RequestOutput]) -> dict[int, bytes]:
    return {number: output.token_ids for number, output in done.items() if output.finish_reason != "abort"}


@pytest.mark.parametrize("num_micro_batches", [2, 3])
def test_steps_in_flight_that_did_not_run_are_taken_back(num_micro_batches: int) -> None:
    def requests() -> list[Request]:
        return [make_request(i, list(range(i + 1, 2 * i + 12)), 20) for i in range(12)]

    core, scheduler, _ = make_core(num_micro_batches)
    expected = answers(answer(core, scheduler, requests()))
    core, scheduler, rank = make_core(num_micro_batches)
    done: dict[int, RequestOutput] = {}
    core.scheduler.add(requests())
    while core.has_work:
        done.update({output.request_id: output for output in core.step()})
        if len(rank.steps) % 10 == 9 and core._in_flight:
            scheduler.put_back(list(core._in_flight))
            core._in_flight.clear()
            rank.outputs.clear()
        scheduler.check_integrity()
    assert answers(done) == expected
