"""Steps that read shared segments once for all, as graphs and eager, on a real GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from segment_answers import EAGER_COSTS, EAGER_PREFIX_COSTS, answers, prompts_of_a_tree

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
    found, num_steps, num_preemptions = answers(runner, prompts, 40, num_blocks=100, costs=EAGER_COSTS)
    assert found == expected
    assert num_steps > 20
    assert num_preemptions > 0
    graphs = runner.steps.graphs
    assert enforce_eager or any(shape.shares_segments for shape in graphs._graphs)  # type: ignore[union-attr]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_answers_are_the_same_where_chunks_share_prefixes(enforce_eager: bool) -> None:
    """In float32; with decode rows beside them that share segments, and chunks of prompts."""
    runner = make_runner(
        demo_path(), dtype="float32", max_num_seqs=24, max_model_len=1024, block_size=16, max_num_batched_tokens=200,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    prompts = sorted(prompts_of_a_tree(random.Random(3), 60, 640, lengths=(16, 48, 160)))
    expected, _, _ = answers(runner, prompts, 10, num_blocks=300, costs=None)
    found, num_steps, _ = answers(
        runner, prompts, 10, num_blocks=300, costs=EAGER_COSTS, prefix_costs=EAGER_PREFIX_COSTS
    )
    assert found == expected
    assert num_steps > 3
    graphs = runner.steps.graphs
    assert enforce_eager or any(shape.shares_prefixes for shape in graphs._graphs)  # type: ignore[union-attr]


def compiled_variants() -> set[tuple[str, str]]:
    """The kernels that attend and plan for it, with what Triton has compiled them for."""
    from nvcli.kernels.triton.attention import (
        decode_attention,
        decode_work_list,
        prefill_attention,
        prefill_tiles,
        segment_attention,
        segment_merge,
        segment_work_list,
        token_rows,
    )

    kernels: list[Any] = [
        decode_attention.decode_attention_kernel,
        decode_work_list.plan_decode_kernel,
        segment_attention.segment_attention_kernel,
        segment_merge.merge_segments_kernel,
        segment_work_list.find_segments_kernel,
        segment_work_list.plan_segments_kernel,
        token_rows.expand_rows_kernel,
        prefill_attention.prefill_attention_kernel,
        prefill_tiles.plan_prefill_kernel,
    ]
    return {
        (kernel.__name__, key)
        for kernel in kernels
        for compiled, *_ in kernel.device_caches.values()
        for key in compiled
    }


def test_a_job_with_shared_segments_compiles_nothing() -> None:
    runner = make_runner(demo_path(), max_num_seqs=24, max_model_len=1024, block_size=16, max_num_batched_tokens=200)
    warmed_up = compiled_variants()
    prompts = prompts_of_a_tree(random.Random(3), 60, 640, lengths=(16, 48, 160))
    _, num_steps, _ = answers(runner, prompts, 8, num_blocks=300, costs=EAGER_COSTS)
    assert num_steps > 5
    with torch.inference_mode():  # the next scheduler knows nothing of the segments of this one
        runner.slots.segments.slot_segments.zero_()
    _, num_steps, _ = answers(
        runner, sorted(prompts), 8, num_blocks=300, costs=EAGER_COSTS, prefix_costs=EAGER_PREFIX_COSTS
    )
    assert num_steps > 1
    assert compiled_variants() == warmed_up


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_rows_with_drafts_share_segments_and_compile_nothing(enforce_eager: bool) -> None:
    """In float32: the answers are those of steps that share nothing."""
    runner = make_runner(
        demo_path(), dtype="float32", max_num_seqs=24, max_model_len=1024, block_size=16, max_num_batched_tokens=200,
        enforce_eager=enforce_eager, draft_policy="always", max_draft_tokens=3,
    )  # fmt: skip
    warmed_up = compiled_variants()
    prompts = prompts_of_a_tree(random.Random(3), 60, 640, lengths=(16, 48, 160))
    expected, _, _ = answers(runner, prompts, 40, num_blocks=300, costs=None)
    found, num_steps, _ = answers(runner, prompts, 40, num_blocks=300, costs=EAGER_COSTS)
    assert found == expected
    assert num_steps > 10
    graphs = runner.steps.graphs
    shapes = () if graphs is None else graphs._graphs
    assert enforce_eager or any(shape.shares_segments and shape.tokens_per_row > 1 for shape in shapes)
    assert compiled_variants() == warmed_up
