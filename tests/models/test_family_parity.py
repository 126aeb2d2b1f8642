"""The logits of every family are those of transformers: of whole prompts, in chunks, behind a shared prefix, token by
token, in stages, and cut over ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_shapes import EXPERT_SHAPES
from model_driver import ModelDriver
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import reference_logits_of, write_tiny_model
from nvcli.distributed.stage import Stage
from nvcli.distributed.tensor_parallel import StageState, TensorParallelGroup
from tensor_parallel_ranks import run_ranks

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
HALF = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 9.0],
}
BY_LAYER_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
    FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
LENGTH = 70

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3, layers without rope": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3, windows where nothing rotates": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 20},
    ),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {**DEFAULT, "rope_type": "dynamic", "factor": 6.0}}),
    "ministral, windows by layer": ("Ministral", {"sliding_window": 20, **FOUR_LAYERS}),
    "ministral 3, queries that grow": (
        "Ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "mistral 3 with vision": (
        "Mistral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}, "tie_word_embeddings": False},
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma 2": ("Gemma2", {"sliding_window": 20, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0}),
    "gemma 3": (
        "Gemma3Text",
        {"sliding_window": 20, "rope_parameters": BY_LAYER_TYPE, "query_pre_attn_scalar": 24, **FOUR_LAYERS},
    ),
    "gemma 3 with vision": (
        "Gemma3",
        {"sliding_window": 20, "rope_parameters": BY_LAYER_TYPE, "tie_word_embeddings": True, **FOUR_LAYERS},
    ),
    "gemma 4, keys as values": (
        "Gemma4Text",
        {
            "sliding_window": 20,
            "rope_parameters": None,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
            **FOUR_LAYERS,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
    "gemma 4, values of their own": (
        "Gemma4Text",
        {"sliding_window": 20, "rope_parameters": None, "global_head_dim": 64, "hidden_size_per_layer_input": 0},
    ),
    "gemma 4, inputs of each layer and shared keys": (
        "Gemma4Text",
        {
            "sliding_window": 20,
            "rope_parameters": None,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "phi 3": ("Phi3", {"sliding_window": 20, "rope_parameters": HALF}),
    "phi 4, longrope of short runs": (
        "Phi3",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": LENGTH,
            "hidden_size": 64,
            "head_dim": 16,
        },
    ),
    "olmo 2": ("Olmo2", {"num_hidden_layers": 3}),
    "olmo 3": ("Olmo3", {"sliding_window": 20, **FOUR_LAYERS}),
    "glm": ("Glm", {"rope_parameters": HALF}),
    "glm 4": ("Glm4", {"rope_parameters": HALF}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "embedding_scale": 0.4,
        },
    ),
    "granite 4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "cohere 2": ("Cohere2", {"sliding_window": 20, "tie_word_embeddings": True, "logit_scale": 0.3, **FOUR_LAYERS}),
    **EXPERT_SHAPES,
}
PROMPT = random.Random(0).choices(range(97), k=LENGTH)
OTHER = [*PROMPT[:32], *random.Random(1).choices(range(97), k=20)]
"""A prompt with the same first 32 tokens."""


Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Gives the checkpoint of a shape, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def write(name: str) -> Path:
        family, overrides = SHAPES[name]
        return write_tiny_model(folder / name, family, **overrides)

    return write


def logits_in_steps(driver: ModelDriver, ids: list[int], *lengths: int) -> Tensor:
    """The logits of a request whose tokens are computed in steps of these lengths, and then one by one."""
    request, start, parts = RequestState(), 0, []
    for length in (*lengths, *[1] * (len(ids) - sum(lengths))):
        parts += driver.step((request, ids[start : start + length]))
        start += length
    return torch.cat(parts) if parts else torch.empty(0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the reference must not be so flat that everything agrees"


@pytest.mark.parametrize("name", SHAPES)
def test_logits(name: str, checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of(name)
    expected, expected_other = reference_logits_of(path, [PROMPT, OTHER])
    driver = ModelDriver(path, max_positions=LENGTH)
    assert_close(logits_in_steps(driver, PROMPT, LENGTH), expected)
    assert_close(logits_in_steps(driver, PROMPT, 7, 40, 11), expected)
    # Two requests read the same blocks for their common prefix, one of them in the step that fills these blocks.
    first = RequestState()
    for group in range(driver.kv_cache.spec.num_groups):
        driver.blocks.grow(first.tables[group], 32, 4)
    second = RequestState(length=32, tables={group: list(table) for group, table in first.tables.items()})
    found, found_other = driver.step((first, PROMPT), (second, OTHER[32:]))
    assert_close(found, expected)
    assert_close(found_other, expected_other[32:])
    if "with vision" in name:
        assert "left on disk" in driver.notes[0]
    if "shared keys" not in name:  # its layers cannot be parted
        assert_close(logits_in_stages(path, PROMPT), expected)


def logits_in_stages(path: Path, ids: list[int]) -> Tensor:
    """The logits of a prompt in two steps, by a pipeline of two stages."""
    stages = [ModelDriver(path, stage=Stage(index, 2), max_positions=LENGTH) for index in range(2)]
    requests = [RequestState() for _ in stages]
    logits = []
    for tokens in (ids[:40], ids[40:]):
        state: StageState | None = None
        for request, stage in zip(requests, stages, strict=True):
            batch = make_batch([(request, tokens)], stage.kv_cache, stage.backend, stage.blocks)
            with torch.inference_mode():
                state = stage.model(batch, state)
        with torch.inference_mode():
            logits.append(stages[-1].model.compute_logits(state))
    return torch.cat(logits)


def rank_logits(group: TensorParallelGroup, paths: list[Path]) -> list[Tensor]:
    return [logits_in_steps(ModelDriver(path, group=group, max_positions=LENGTH), PROMPT, 30, 38) for path in paths]


def test_same_logits_of_two_ranks(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    paths = [checkpoint_of(name) for name in SHAPES]
    first_rank, _ = run_ranks(2, rank_logits, tmp_path, paths)
    for found, path in zip(first_rank, paths, strict=True):
        assert_close(found, reference_logits_of(path, [PROMPT])[0])


def test_a_long_run_takes_longrope_s_long_factors(checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of("phi 4, longrope of short runs")
    ids = [*PROMPT, *OTHER]
    driver = ModelDriver(path)
    assert_close(logits_in_steps(driver, ids, len(ids)), reference_logits_of(path, [ids])[0])
