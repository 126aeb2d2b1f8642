"""A model over several GPUs, whole engine and real processes: right answers, in graphs and eagerly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_generation import generate, run_wide_model, share_of_right_answers

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("tp", [2, 4])]


@pytest.fixture(autouse=True)
def enough_gpus(tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")


@pytest.mark.parametrize(
    ("enforce_eager", "sampling"),
    [
        (False, {"temperature": 0.0}),
        (True, {"temperature": 0.0}),
        (False, {"temperature": 0.1}),  # candidates of each rank
        (False, {"temperature": 0.1, "top_k": 5}),  # gathered logits
        (False, {"temperature": 0.1, "repetition_penalty": 1.0001}),
    ],
)
def test_built_in_model_answers_right(tp: int, enforce_eager: bool, sampling: dict[str, Any]) -> None:
    share, ready = share_of_right_answers(
        120, tensor_parallel_size=tp, max_num_seqs=16, enforce_eager=enforce_eager, sampling=sampling
    )
    assert not any("NCCL alone" in note for note in ready.notes), ready.notes
    assert share >= 0.97


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_graphs_sample_what_eager_steps_do(tp: int, sampling: dict[str, Any]) -> None:
    """As many requests as a graph has rows, all begun in one step and as long as each other: the same products."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 640) for _ in range(20)] for _ in range(16)]
    options = {"max_tokens": 60, "sampling": sampling, "tensor_parallel_size": tp, "max_num_seqs": 16}
    eager, _, _ = generate(prompts, enforce_eager=True, **options)
    graphs, _, _ = generate(prompts, **options)
    assert graphs == eager


def test_a_wide_model_runs_in_its_memory(tp: int, tmp_path: Path) -> None:
    """Sums of every kind, and the memory that is shared is in the plan."""
    for use in run_wide_model(tmp_path, tp, tensor_parallel_size=tp).memory:
        assert use.planned["buffers"] > 4 * 8192 * 1024 * 2
