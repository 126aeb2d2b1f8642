"""A model in stages over several GPUs, whole engine and real processes: right answers, in graphs and eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_generation import generate, run_wide_model, share_of_right_answers

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2), (2, 4)])]


@pytest.fixture(autouse=True)
def enough_gpus(pp: int, tp: int) -> None:
    if torch.cuda.device_count() < pp * tp:
        pytest.skip(f"needs {pp * tp} GPUs")


@pytest.mark.parametrize(
    ("enforce_eager", "sampling"),
    [
        (False, {"temperature": 0.0}),
        (True, {"temperature": 0.0}),
        (False, {"temperature": 0.1, "top_k": 5}),
        (False, {"temperature": 0.1, "repetition_penalty": 1.0001}),
    ],
)
def test_built_in_model_answers_right(pp: int, tp: int, enforce_eager: bool, sampling: dict[str, Any]) -> None:
    """So many at a time that decode rows fill mixed graphs."""
    share, _ = share_of_right_answers(
        240, pipeline_parallel_size=pp, tensor_parallel_size=tp, enforce_eager=enforce_eager, sampling=sampling
    )
    assert share >= 0.97


def test_chunks_and_preemption(pp: int, tp: int) -> None:
    """A small cache and small steps: every request gets all its tokens."""
    prompts = [list(range(3 + i, 103 + i)) for i in range(24)]
    size = (16 << 20) // pp // min(tp, 2)  # about 64 blocks, and the requests want 96
    answers, _, stats = generate(
        prompts,
        max_tokens=100,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        kv_cache_memory=size,
        max_model_len=512,
        max_num_batched_tokens=64,
    )
    assert [len(answer) for answer in answers] == [100] * 24
    assert stats.num_preemptions > 0


def test_a_wide_model_runs_in_its_memory(pp: int, tp: int, tmp_path: Path) -> None:
    """The links' buffers and NCCL are in the plan."""
    run_wide_model(tmp_path, pp * tp, pipeline_parallel_size=pp, tensor_parallel_size=tp)
