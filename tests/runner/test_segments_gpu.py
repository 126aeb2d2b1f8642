"""Steps that read shared segments once for all, as graphs and eager, on a real GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
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


@torch.inference_mode()
def test_their_graphs_are_captured_while_the_device_works() -> None:
    runner = make_runner(demo_path(), max_num_seqs=24, max_model_len=1024, block_size=16, max_num_batched_tokens=200)
    graphs = runner.steps._graphs
    assert graphs is not None
    late = [shape for shape in graphs.shapes if shape.shares_segments]
    assert not any(map(graphs.has_captured, late))
    torch.cuda._sleep(4_000_000_000)  # two seconds
    is_over = torch.cuda.Event()
    is_over.record()
    for shape in late[:2]:
        graphs.capture_late(shape)
    assert not is_over.query()
    torch.cuda.synchronize()


def compiled_variants() -> set[tuple[str, str]]:
    """The kernels that attend rows of one token and plan for it, with what Triton has compiled them for."""
    from nvcli.kernels.triton import decode_attention, decode_work_list, segment_attention, segment_work_list

    kernels: list[Any] = [
        decode_attention.decode_attention_kernel,
        decode_work_list.plan_decode_kernel,
        segment_attention.segment_attention_kernel,
        segment_work_list.find_segments_kernel,
        segment_work_list.plan_segments_kernel,
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
    assert compiled_variants() == warmed_up
