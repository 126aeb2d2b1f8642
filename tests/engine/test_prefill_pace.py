"""Prompts are spread over steps while most slots decode, and computed at once where slots are empty."""

from __future__ import annotations

from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.prefill_pace import prefill_budget
from nvcli.engine.prompt import Prompt
from nvcli.engine.state import RequestState
from requests_factory import make_request

LIMITS = SchedulerLimits(
    max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=40_000, block_size=16, plans_admission=True
)


def prompts(*lengths: int) -> list[RequestState]:
    requests = [make_request(i, [5] * length, 10) for i, length in enumerate(lengths)]
    return [RequestState(request, Prompt(request)) for request in requests]


def test_while_most_slots_decode_a_step_computes_a_part_of_what_is_due() -> None:
    assert prefill_budget(LIMITS, 62, 62, prompts(500)) == 256
    assert prefill_budget(LIMITS, 60, 60, prompts(2049)) == 512
    assert prefill_budget(LIMITS, 60, 60, prompts(10_000, 2_000)) == 1536
    assert prefill_budget(LIMITS, 60, 60, prompts(30_000, 30_000, 30_000)) == 8192 - 60


def test_empty_slots_are_filled_at_once() -> None:
    assert prefill_budget(LIMITS, 59, 59, prompts(500)) == 8192 - 59
    assert prefill_budget(LIMITS, 0, 0, prompts(500)) == 8192


def test_without_a_plan_a_step_takes_what_it_can() -> None:
    greedy = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=40_000, block_size=16)
    assert prefill_budget(greedy, 63, 63, prompts(500)) == 8192 - 63
