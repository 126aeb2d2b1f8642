"""Grammars on their way to the ranks: each travels once a step, within a bound, and again with a request that was
preempted, whose answer so far comes along."""

from __future__ import annotations

import pytest

from nvcli.core.message_sizes import max_step_input_bytes
from nvcli.core.messages import CONSTRAINT_FAILED, MAX_STEP_GRAMMAR_BYTES, StepOutput, pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import MAX_GRAMMAR_BYTES, Constraint
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.step_draft import ScheduledStep
from requests_factory import make_request

END_ID = 9


def make_scheduler(*, num_blocks: int = 50) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=4)
    return Scheduler(limits, BlockManager(num_blocks))


def constraint(grammar: str) -> Constraint:
    return Constraint(grammar=grammar, end_ids=[END_ID])


def run_step(scheduler: Scheduler, token: int = 5) -> ScheduledStep:
    """A step whose tokens come back at once."""
    step = scheduler.schedule()
    assert step is not None
    output = StepOutput(step_id=step.input.step_id, token_ids=pack([token] * len(step.sampling)))
    scheduler.process(step, output)
    scheduler.check_integrity()
    return step


def test_a_step_brings_each_grammar_once() -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(min_tokens=3)
    scheduler.add(
        [
            make_request(0, [1], 8, constraint=constraint("a"), n=2),
            make_request(2, [1], 8, constraint=constraint("b"), stop_ids=[END_ID, 7], sampling=sampling),
            make_request(3, [1], 8),
            make_request(4, [1], 8, constraint=constraint("a")),
        ]
    )
    step = run_step(scheduler).input
    assert [constraint.grammar for constraint in step.constraints] == ["a", "b"]
    assert [new.constraint for new in step.new_slots] == [0, 0, 1, None, 0]
    assert step.new_slots[2].sampling.stop_ids == [END_ID, 7]
    later = run_step(scheduler).input
    assert later.constraints == []
    assert later.token_ids == b"", "no request waits for its last token"


def test_grammars_of_a_step_are_bounded_and_the_others_follow() -> None:
    scheduler = make_scheduler()
    grammars = [str(number) * MAX_GRAMMAR_BYTES for number in range(5)]
    scheduler.add(make_request(number, [1], 8, constraint=constraint(g)) for number, g in enumerate(grammars))
    brought = [[each.grammar for each in run_step(scheduler).input.constraints] for _ in range(3)]
    assert brought == [grammars[:2], grammars[2:4], grammars[4:]]
    sizes = {"max_num_batched_tokens": 64, "max_model_len": 64, "max_blocks_per_seq": 16}
    assert max_step_input_bytes(max_num_seqs=8, **sizes) > MAX_STEP_GRAMMAR_BYTES


def test_a_request_that_enters_again_brings_its_answer_along() -> None:
    """Also the part whose keys are in the prefix cache. A request that is put back is one that was preempted."""
    scheduler = make_scheduler()
    scheduler.add([make_request(0, [1, 2, 3], 40), make_request(1, [4, 5, 6], 40, constraint=constraint("a"))])
    for token in range(10, 20):
        run_step(scheduler, token)
    scheduler.put_back([])
    step = run_step(scheduler).input
    assert [each.grammar for each in step.constraints] == ["a"]
    spans = list(zip(*map(unpack, (step.token_slots, step.token_starts, step.token_counts)), strict=True))
    brought: dict[int, list[int]] = {}
    first = 0
    for slot, start, count in spans:
        brought.setdefault(slot, [-1] * 13)[start : start + count] = unpack(step.token_ids)[first : first + count]
        first += count
    free, constrained = step.new_slots
    assert free.num_cached_tokens == constrained.num_cached_tokens == 8
    assert brought[free.slot] == [-1] * 8 + [*range(15, 20)]
    assert brought[constrained.slot] == [4, 5, 6, *range(10, 20)]


def test_a_grammar_that_cannot_be_followed_is_an_error_row() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request(0, [1], 8, constraint=constraint("a")), make_request(1, [1], 2)])
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    scheduler.process(step, StepOutput(step_id=step.input.step_id, token_ids=pack([CONSTRAINT_FAILED, 5])))
    failed, other = sorted(scheduler.take_outputs(), key=lambda output: output.request_id)
    assert (failed.finish_reason, failed.error_type) == ("error", "structured_too_complex")
    assert unpack(failed.token_ids).tolist() == [5]
    assert "after token 1 of the answer" in failed.error
    assert other.finish_reason == "length"
    scheduler.check_integrity()


@pytest.mark.parametrize("num_generated", [0, 1])
def test_a_prefix_travels_for_answers_alone(num_generated: int) -> None:
    """A constrained request that has no answer yet needs no tokens of its cached prompt."""
    scheduler = make_scheduler()
    scheduler.add([make_request(0, list(range(1, 30)), 1)])
    run_step(scheduler)
    scheduler.add([make_request(1, list(range(1, 30)), 4, constraint=constraint("a"))])
    step = run_step(scheduler).input
    assert [new.num_cached_tokens for new in step.new_slots] == [28]
    assert unpack(step.token_starts).tolist() == [28]
