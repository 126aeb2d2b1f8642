"""Policies of drafts, simulated: steps whose costs and acceptance are known."""

from __future__ import annotations

import random

import pytest

from nvcli.core.messages import StepInput, StepOutput, pack
from nvcli.engine.draft_policy import Drafting, DraftPolicy

WIDTHS = (2, 3, 4, 6, 8)
NUM_STEPS = 20_000


def step_seconds(num_rows: int, width: int) -> float:
    """A GPU that reads 16 GB of weights in 4 ms and computes 200 tokens meanwhile; each row has keys to read, for which
    rows with drafts take a kernel that is slow with many of them."""
    tokens = num_rows * width
    keys = num_rows * 8e-6 * (1.0 if width == 1 else 4.0)
    return max(4e-3, tokens * 2e-5) + keys + 1e-4 * (width > 1)


def run(
    policy: DraftPolicy, num_rows: int, accept_rate: float, num_steps: int = NUM_STEPS, *, noise: float = 0.0
) -> tuple[float, int]:
    """The seconds of so many steps, and the tokens that they give."""
    rng = random.Random(num_rows)
    seconds, tokens = 0.0, 0
    for number in range(num_steps):
        width = policy.width(num_rows, 1 << 20, has_prompts=False)
        counts = [accepted(rng, width, accept_rate) for _ in range(min(num_rows, 32))]
        counts = (counts * (-(-num_rows // len(counts))))[:num_rows]
        took = step_seconds(num_rows, width) * (1 + rng.uniform(-noise, noise))
        row_limits = pack([1000] * num_rows) if width > 1 else b""
        step = StepInput(
            step_id=number,
            slots=pack(range(num_rows)),
            num_tokens=pack([width] * num_rows),
            num_logits=pack([width] * num_rows),
            num_decodes=num_rows,
            row_limits=row_limits,
        )
        drafted = pack([width - 1] * num_rows) if width > 1 else b""
        policy.learn(
            step, StepOutput(step_id=number, token_ids=b"", counts=pack(counts), drafted=drafted, seconds=took)
        )
        seconds += took
        tokens += sum(counts)
    return seconds, tokens


def accepted(rng: random.Random, width: int, accept_rate: float) -> int:
    """The tokens that a row of this width gives."""
    count = 1
    while count < width and rng.random() < accept_rate:
        count += 1
    return count


def make_policy(**fields: int) -> DraftPolicy:
    return DraftPolicy(Drafting(widths=WIDTHS, max_step_tokens=fields.pop("max_step_tokens", 1024)))


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("num_rows", [1, 16, 256, 1024])
def test_drafts_that_are_always_wrong_cost_less_than_a_hundredth(num_rows: int, noise: float) -> None:
    num_steps = NUM_STEPS if num_rows < 256 else NUM_STEPS // 10
    seconds, tokens = run(make_policy(), num_rows, 0.0, num_steps, noise=noise)
    plain = num_steps * step_seconds(num_rows, 1)
    assert tokens / seconds > 0.99 * num_rows * num_steps / plain


@pytest.mark.parametrize(("num_rows", "least"), [(1, 2.5), (16, 2.0), (64, 1.2)])
def test_drafts_that_are_mostly_right_are_made(num_rows: int, least: float) -> None:
    num_steps = 2_000
    seconds, tokens = run(make_policy(), num_rows, 0.7, num_steps, noise=0.02)
    assert tokens / seconds > least * num_rows / step_seconds(num_rows, 1)


def test_drafts_are_found_again_where_the_text_changes() -> None:
    """Also after a long time without."""
    policy = make_policy()
    run(policy, 4, 0.0, 3_000)
    seconds, tokens = run(policy, 4, 0.8, 1_000)
    assert tokens / seconds > 2.0 * 4 / step_seconds(4, 1)


def test_drafts_that_do_not_pay_with_many_rows_are_made_with_few() -> None:
    """As at the end of a job."""
    policy = make_policy()
    for num_rows in (256, 128, 64):
        run(policy, num_rows, 0.7, 300)
    for num_rows, least in ((16, 1.8), (4, 2.3), (1, 2.4)):
        seconds, tokens = run(policy, num_rows, 0.7, 300)
        assert tokens / seconds > least * num_rows / step_seconds(num_rows, 1)


def test_no_drafts_beside_prompts_or_where_a_step_has_no_room() -> None:
    policy = make_policy()
    run(policy, 4, 0.9, 200)
    assert policy.width(4, 400, has_prompts=False) > 1
    assert policy.width(4, 400, has_prompts=True) == 1
    assert policy.width(4, 4, has_prompts=False) == 1
    assert policy.width(1000, 10_000, has_prompts=False) == 1


def test_always_drafts_as_many_as_there_may_be() -> None:
    policy = DraftPolicy(Drafting(widths=WIDTHS, policy="always", max_step_tokens=64))
    assert [policy.width(rows, 10_000, has_prompts=True) for rows in (0, 1, 8, 10, 16, 40)] == [1, 8, 8, 6, 4, 1]
    assert policy.width(2, 14, has_prompts=False) == 6


def test_drafted_and_accepted_tokens_are_counted() -> None:
    policy = DraftPolicy(Drafting(widths=(3,), policy="always"))
    step = StepInput(
        step_id=0, slots=pack([0, 1, 2]), num_tokens=pack([3, 3, 3]), num_decodes=3, row_limits=pack([9] * 3)
    )
    policy.learn(
        step,
        StepOutput(
            step_id=0, token_ids=b"", counts=pack([1, 3, 0]), drafted=pack([2, 2, 0]), draft_sources=pack([0, 1, 0])
        ),
    )
    assert (policy.num_drafted, policy.num_accepted) == ([2, 2], [0, 2])
