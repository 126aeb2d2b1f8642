"""Whole engines whose two ranks compute the attention of different requests: the answers are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import assert_greedy, generate, generate_here, requests, tokens_of
from test_generation_parity import CHECKPOINTS

from checkpoints import write_tiny_model
from combinations import full
from expert_shapes import EXPERT_SHAPES


def shape(name: str, **changes: Any) -> dict[str, Any]:
    family, arguments = EXPERT_SHAPES[name]
    return {"family": family, **arguments, **changes}


SHAPES = {
    "deepseek v3": shape("deepseek v3"),
    "qwen 3.5": CHECKPOINTS["qwen-3.5"],
    "deepseek v2": shape("deepseek v2, queries without latents"),
    "glm 4.7 flash": shape("glm 4.7 flash"),
    "qwen3 moe": shape("qwen3 moe", num_key_value_heads=1),
    "minimax text 01": shape("minimax text 01"),
    "deepseek v4": CHECKPOINTS["deepseek-v4"],
}


@pytest.mark.parametrize("name", [*SHAPES][:2] + [full(name) for name in [*SHAPES][2:]])
def test_answers(name: str, tmp_path: Path) -> None:
    """In small chunks, with prefix hits, so little memory that requests are preempted, and rows of all kinds, at whose
    end one of the homes is empty."""
    path = write_tiny_model(tmp_path / "model", **SHAPES[name])
    batch = requests()
    random.Random(0).shuffle(batch)
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 16}
    expected, _ = generate_here(path, batch, **limits)
    done, stats = generate(
        path,
        batch,
        tensor_parallel_size=2,
        enable_attention_dp=True,
        enable_expert_parallel=name.startswith("deepseek"),
        num_kv_tokens=360,
        plan_admission=False,
        **limits,
    )
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    assert tokens_of(done) == tokens_of(expected)
    assert_greedy(path, tokens_of(done))


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("name", ["deepseek v3", "qwen 3.5", "qwen3 moe"])
def test_two_gpus(name: str, enforce_eager: bool, tmp_path: Path) -> None:
    """In float32, in graphs and eagerly."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    path = write_tiny_model(tmp_path / "model", **SHAPES[name])
    done, stats = generate(
        path,
        requests(),
        device="cuda",
        dtype="float32",
        tensor_parallel_size=2,
        enable_attention_dp=True,
        enforce_eager=enforce_eager,
        block_size=16,
        max_num_batched_tokens=96,
        max_num_seqs=16,
    )
    assert stats.cached_tokens > 0
    assert_greedy(path, tokens_of(done))
