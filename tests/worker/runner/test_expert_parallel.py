"""Whole engine, real processes, whole experts on each rank: the answers are transformers' own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from generation import assert_greedy, generate, prompts, requests, tokens_of

from checkpoints import write_tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Experts behind a dense layer, with a shared expert, groups and a correction."""
    return write_tiny_model(
        tmp_path / "model",
        "Glm4Moe",
        num_hidden_layers=3,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )


def test_whole_experts_do_not_change_the_answers(checkpoint: Path) -> None:
    """Two stages of two ranks, in small chunks, with prefix hits, and with so little memory that requests are
    preempted."""
    batch = requests()[: len(prompts())]
    random.Random(0).shuffle(batch)
    done, stats = generate(
        checkpoint,
        batch,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        pipeline_parallel_size=2,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        num_kv_tokens=166,  # of keys and values of all heads, of which each rank has half
    )
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    assert_greedy(checkpoint, tokens_of(done))


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_gpus(checkpoint: Path, expert_parallel: bool, enforce_eager: bool) -> None:
    """In float32, with parts of every expert and with whole experts, in graphs and eagerly."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    done, _ = generate(
        checkpoint,
        requests()[: len(prompts())],
        device="cuda",
        dtype="float32",
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
        enforce_eager=enforce_eager,
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=16,
    )
    assert_greedy(checkpoint, tokens_of(done))
