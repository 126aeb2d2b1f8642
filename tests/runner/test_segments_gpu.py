"""Steps that read shared segments once for all, as graphs and eager, on a real GPU."""

from __future__ import annotations

import random

import pytest
from segment_answers import EAGER_COSTS, answers, prompts_of_a_tree

from nvcli.demo import demo_path
from one_rank import make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_is_given_back")]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_the_same_with_shared_segments(enforce_eager: bool) -> None:
    """In float32, so that no token depends on the order of sums; with preemptions, and chunks of prompts."""
    runner = make_runner(
        demo_path(), dtype="float32", max_num_seqs=24, max_model_len=1024, block_size=16, max_num_batched_tokens=200,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    prompts = prompts_of_a_tree(random.Random(3), 60, 640, lengths=(16, 48, 160))
    expected, _, _ = answers(runner, prompts, 40, num_blocks=300, costs=None)
    found, num_steps, _ = answers(runner, prompts, 40, num_blocks=300, costs=EAGER_COSTS)
    assert found == expected
    assert num_steps > 20
    graphs = runner.steps._graphs
    assert enforce_eager or any(shape.shares_segments for shape in graphs._graphs)  # type: ignore[union-attr]
