"""Random checkpoints: the tokens are transformers' own, however they are computed.

Whole engines with processes of their own answer for one checkpoint, engines in this process for the others. Each
circumstance (chunked prefill, prefix hits, preemption, tensor parallelism) answers the same requests, and must
give the same greedy continuations as transformers, and the same sampled ones as every other circumstance.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from generation import generate, generate_here, greedy_answers, requests

from checkpoints import write_tiny_model
from nvcli.core.messages import unpack

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen-3.5": {
        "family": "Qwen3_5MoeText",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "seed": 4,
    },
    "nemotron-h": {
        "family": "NemotronH",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "num_hidden_layers": 5,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-9,
        "seed": 5,
    },
    "tied-gqa2": {"tie_word_embeddings": True},
    "untied-mha": {"num_key_value_heads": 4, "max_shard_size": "30KB"},
    "glm-4.7-flash": {
        "family": "Glm4MoeLite",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 12,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "seed": 3,
    },
    "mistral": {"family": "Mistral", "sliding_window": 45, "seed": 1},
    "gemma-4": {
        "family": "Gemma4Text",
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "sliding_window": 40,
        "rope_parameters": None,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "tie_word_embeddings": True,
        "seed": 2,
    },
}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "plain": {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "prefix-hits": {"max_num_seqs": 6, "max_num_batched_tokens": 512},
    "preempted": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kv_tokens": 380},
}
ONLY_HEADS = {"tied-gqa2": "chunked", "untied-mha": "prefix-hits", "untied-gqa4": "preempted"}
"""Checkpoints that differ in the number of their heads alone, each with the circumstance that it is run in."""
TWO_RANKS = {"tensor_parallel_size": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64}
"""How the layers of other checkpoints are cut is a test of models."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, **CHECKPOINTS[request.param])


@pytest.fixture(scope="module")
def greedy_reference(checkpoint: Path) -> list[list[int]]:
    return greedy_answers(checkpoint)


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> dict[int, list[int]]:
    done, stats = generate_here(checkpoint, requests(), **CIRCUMSTANCES["plain"])
    assert stats.cached_tokens == 0
    return {i: unpack(output.token_ids).tolist() for i, output in done.items()}


def test_plain(plain_answers: dict[int, list[int]], greedy_reference: list[list[int]]) -> None:
    for i, expected in enumerate(greedy_reference):
        assert plain_answers[i] == expected
    answers = [tuple(tokens) for i, tokens in plain_answers.items() if i >= 1000]
    assert len(set(answers)) > len(answers) // 2  # sampled answers do differ


@pytest.mark.parametrize(
    "config",
    [
        # The same circumstances in this process are the next test.
        *(pytest.param(CIRCUMSTANCES[name], id=name, marks=pytest.mark.full) for name in ("plain", "chunked")),
        *(pytest.param(CIRCUMSTANCES[name], id=name) for name in ("prefix-hits", "preempted")),
        pytest.param(TWO_RANKS, id="tp2"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["qwen-3.5"], indirect=True)
def test_whole_engines_give_the_same_answers(
    checkpoint: Path, plain_answers: dict[int, list[int]], config: dict[str, Any]
) -> None:
    done, stats = generate(checkpoint, requests(), **config)
    assert {number: unpack(output.token_ids).tolist() for number, output in done.items()} == plain_answers
    assert (stats.cached_tokens > 0) == config.get("enable_prefix_caching", True)


@pytest.mark.parametrize(
    ("checkpoint", "circumstance"),
    [
        pytest.param(
            name,
            circumstance,
            id=f"{name}-{circumstance}",
            marks=() if ONLY_HEADS.get(name, circumstance) == circumstance else pytest.mark.full,
        )
        for name in CHECKPOINTS
        for circumstance in CIRCUMSTANCES
        if circumstance != "plain"
    ],
    indirect=["checkpoint"],
)
def test_circumstances_do_not_change_the_answers(
    checkpoint: Path,
    plain_answers: dict[int, list[int]],
    greedy_reference: list[list[int]],
    circumstance: str,
) -> None:
    batch = requests()
    random.Random(circumstance).shuffle(batch)
    config = CIRCUMSTANCES[circumstance]
    if circumstance == "preempted" and checkpoint.name == "gemma-4":
        config = {
            **config,
            "num_kv_tokens": 410,
        }  # its groups of layers share the blocks: the longest prompt needs these
    done, stats = generate_here(checkpoint, batch, **config)
    if circumstance == "preempted":
        assert stats.num_preemptions > 0
    else:
        assert stats.cached_tokens > 100
    answers = {i: unpack(output.token_ids).tolist() for i, output in done.items()}
    for i, expected in enumerate(greedy_reference):
        assert answers[i] == expected, f"prompt {i}"
    assert answers == plain_answers


@pytest.mark.parametrize("checkpoint", ["qwen-3.5"], indirect=True)
def test_states_in_two_stages_of_two_ranks(checkpoint: Path, plain_answers: dict[int, list[int]]) -> None:
    """All at once: chunks, prefix hits and preemption. No drafts, although they are wanted."""
    config: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "max_num_seqs": 16}
    config |= {"max_num_batched_tokens": 40, "max_draft_tokens": 3, "draft_policy": "always"}
    done, stats = generate(checkpoint, requests(), **config, num_kv_tokens=380)
    assert {number: unpack(output.token_ids).tolist() for number, output in done.items()} == plain_answers
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.drafted_tokens == 0
