"""A request whose logits are not finite ends alone; a model that gives nothing else ends the run."""

from __future__ import annotations

import random

import msgspec
import pytest

from fake_runners import HashingRunner, engine_config
from nvcli.core.messages import NOT_FINITE, KVGroup, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request, RequestOutput
from nvcli.errors import ModelError
from nvcli.worker.runner.interface import RankContext
from rank_in_process import RankInProcess, make_core, run
from requests_factory import make_request

POISON = 666
"""A token behind which this model's logits are not finite."""


class PoisonedRunner(HashingRunner):
    """Tells `NOT_FINITE` to the engine from the step on that computes the poison."""

    def __init__(self, limits: SchedulerLimits) -> None:
        context = RankContext(rank=0, report_phase=lambda phase: None)
        super().__init__(engine_config(block_size=limits.block_size), context)
        self.groups = limits.kv_groups

    def compute(self, slot: int, num_tokens: int, num_logits: int, limit: int | None) -> list[int]:
        given = super().compute(slot, num_tokens, num_logits, limit)
        return [NOT_FINITE] * len(given) if POISON in self.tokens[slot].values() else given


class PoisonedRank(RankInProcess):
    def make_runner(self) -> HashingRunner:
        return PoisonedRunner(self.limits)


def answers(
    requests: list[Request], *, num_blocks: int = 100, max_in_flight: int = 2, **limits: object
) -> dict[int, RequestOutput]:
    values = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4, **limits}
    scheduler_limits = SchedulerLimits(**values)  # type: ignore[arg-type]
    core, scheduler = make_core(
        scheduler_limits, PoisonedRank(scheduler_limits), num_blocks=num_blocks, max_in_flight=max_in_flight
    )
    core.scheduler.add(requests)
    done = run(core, scheduler)
    assert core.scheduler.stats.generated_tokens == sum(len(unpack(output.token_ids)) for output in done.values())
    return done


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"num_blocks": 14},  # with preemptions
        {"num_micro_batches": 2, "max_in_flight": 3},
        {"kv_groups": (KVGroup(), KVGroup(window=6)), "num_blocks": 60},
    ],
    ids=["plain", "few-blocks", "stages", "windows"],
)
def test_other_requests_keep_their_answers(limits: dict[str, object]) -> None:
    rng = random.Random(1)
    requests = [
        make_request(i, [rng.randrange(1, 9) for _ in range(rng.randrange(2, 20))], rng.randrange(1, 12))
        for i in range(40)
    ]
    sound = answers(requests, **limits)  # type: ignore[arg-type]
    poisoned = set(range(3, 40, 4))
    mixed = [
        make_request(i, [*unpack(r.prompt_ids)[:-1], POISON], r.max_tokens) if i in poisoned else r
        for i, r in enumerate(requests)
    ]
    for i, output in answers(mixed, **limits).items():  # type: ignore[arg-type]
        if i in poisoned:
            assert (output.finish_reason, output.error_type, output.token_ids) == ("error", "non_finite_logits", b"")
            assert "NaN or infinite" in output.error
        else:
            assert output.token_ids == sound[i].token_ids


def test_what_was_generated_before_is_not_lost_from_the_count_nor_told_as_the_answer() -> None:
    """The third token is not finite: a row in the middle of its answer."""
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=4)
    rank = PoisonedRank(limits)
    core, scheduler = make_core(limits, rank, num_blocks=20)
    core.scheduler.add([make_request(0, [1, 2, 3], 9)])
    for _ in range(3):
        core.step()
    rank.runner.tokens[0][0] = POISON
    (output,) = run(core, scheduler).values()
    assert output.error_type == "non_finite_logits"
    assert 0 < len(unpack(output.token_ids)) == core.scheduler.stats.generated_tokens < 9


def test_the_prefix_cache_forgets_what_was_computed_behind_broken_tokens() -> None:
    """A prefix of such a request is computed again, one of another request is found."""
    broken, sound = [POISON, *range(1, 12)], list(range(20, 32))
    requests = [make_request(i, prompt, 1) for i, prompt in enumerate([broken, sound])]
    requests += [make_request(i + 2, [*prompt, 50], 1) for i, prompt in enumerate([broken, sound])]
    done = answers(requests, max_num_seqs=1)
    assert [done[i].num_cached_tokens for i in range(4)] == [0, 0, 0, 12]
    assert done[2].error_type == "non_finite_logits"


def test_a_run_in_which_nothing_is_finite_ends() -> None:
    prompts = [[POISON, i] for i in range(40)]
    with pytest.raises(ModelError, match=r"first 16 prompts are NaN.*weights or the dtype are at fault"):
        answers([make_request(i, prompt, 5) for i, prompt in enumerate(prompts)], max_num_seqs=4)


def test_one_sound_row_or_one_broken_prompt_is_no_broken_model() -> None:
    """A file may begin with a row that breaks, and a row may have many samples."""
    prompts = [[POISON, 1]] * 40 + [[1, 2]]
    done = answers([make_request(i, prompt, 5) for i, prompt in enumerate(prompts)])
    assert len(unpack(done[40].token_ids)) == 5
    prompts = [[1, 2]] + [[POISON, i] for i in range(40)]
    done = answers([make_request(i, prompt, 5) for i, prompt in enumerate(prompts)])
    assert sum(output.finish_reason == "error" for output in done.values()) == 40


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingParams(repetition_penalty=1.2)},
        {"sampling": SamplingParams(presence_penalty=-2)},
        {"sampling": SamplingParams(logit_bias={5: 100})},
        {"sampling": SamplingParams(allowed_token_ids=[20])},
        {"sampling": SamplingParams(min_tokens=2)},
        {"bad_words": [[5, 6]]},
        {"forbidden_ids": [5]},
        {"constraint": Constraint(grammar="g", end_ids=[0])},
    ],
)
def test_rows_that_ask_for_other_logits_say_nothing_of_the_weights(changes: dict[str, object]) -> None:
    """A run goes on behind any number of them, and ends with those that leave the logits alone."""
    rows = [msgspec.structs.replace(make_request(i, [POISON, i], 5), **changes) for i in range(40)]
    sound = make_request(40, [1, 2], 5)
    done = answers([*rows, sound])
    assert {done[i].error_type for i in range(40)} == {"non_finite_logits"}
    assert len(unpack(done[40].token_ids)) == 5
    plain = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    broken = [msgspec.structs.replace(make_request(i, [POISON, i], 5), sampling=plain) for i in range(41, 60)]
    with pytest.raises(ModelError):
        answers([*rows, *broken])


def test_rows_that_forbid_every_token_themselves_are_no_broken_model() -> None:
    constraint = Constraint(grammar="g", end_ids=[0])
    rows = [
        msgspec.structs.replace(
            make_request(i, [POISON, i], 5),
            sampling=SamplingParams(allowed_token_ids=[20]),
            constraint=constraint,
        )
        for i in range(40)
    ]
    done = answers(rows)
    assert {output.error_type for output in done.values()} == {"invalid_structured"}
    assert "`structured` or `tool_choice` permits none of the `allowed_token_ids` (or" in done[0].error
