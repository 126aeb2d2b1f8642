"""Answers to prompts that form trees, with and without segments that are read once for all."""

from __future__ import annotations

import random

from nvcli.core.messages import StepInput
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.worker.runner.model_runner import ModelRunner
from nvcli.worker.runner.step_results import PendingStep
from one_rank import make_scheduler, run_requests
from requests_factory import make_request

EAGER_COSTS = SegmentCosts(tile=1, partial_result=0, least_gain=1, least_saved_in_step=1)
"""Whatever two requests share is read once."""
EAGER_PREFIX_COSTS = PrefixCosts(tile_tokens=64, token=0, least_gain=1, least_gain_in_step=1)
"""Whatever short chunks share they are attended to together."""


def prompts_of_a_tree(rng: random.Random, number: int, vocab_size: int, *, lengths: tuple[int, ...]) -> list[list[int]]:
    """Make prompts whose beginnings form a tree of up to three levels, a random one of the lengths each, and which end
    in up to 30 tokens of their own."""
    tree: list[list[int]] = [[]]
    most = 3 * max(lengths)
    prompts = []
    for _ in range(number):
        prefix = rng.choice(tree[-6:])
        longer = prefix + [rng.randrange(3, vocab_size) for _ in range(rng.choice(lengths))]
        if len(tree) < 12 and len(longer) <= most and rng.random() < 0.6:
            tree.append(longer)
            prefix = longer
        prompts.append(prefix + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 30))])
    return prompts


def answers(
    runner: ModelRunner,
    prompts: list[list[int]],
    max_tokens: int,
    *,
    num_blocks: int,
    costs: SegmentCosts | None,
    prefix_costs: PrefixCosts | None = None,
) -> tuple[list[list[int]], int, int]:
    """Return the greedy answers in the order of the prompts, and the numbers of steps that read anything once for
    several rows (with `prefix_costs`: prefixes for prefill chunks) and of preemptions."""
    scheduler = make_scheduler(runner, num_blocks, segment_costs=costs, prefix_costs=prefix_costs)
    num_steps = 0
    launch = runner.launch

    def counted(step: StepInput) -> PendingStep | None:
        nonlocal num_steps
        num_steps += step.shares_segments if prefix_costs is None else bool(step.shared_prefixes)
        return launch(step)

    runner.launch = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0)
    requests = [make_request(i, prompt, max_tokens, sampling=params) for i, prompt in enumerate(prompts)]
    try:
        tokens = run_requests(runner, requests, scheduler)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    return [tokens[i] for i in range(len(prompts))], num_steps, scheduler.stats.num_preemptions
