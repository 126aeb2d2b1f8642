"""The logits are those of transformers at every position, for every family, however the tokens are cut into steps."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import RequestState
from checkpoints import reference_logits, write_tiny_model
from model_driver import ModelDriver

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, untied, gqa 2": ("Qwen3", {}),
    "qwen3, tied, gqa 1": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3, tied, gqa 4": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen3, yarn": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3, biased, wide heads": (
        "Qwen3",
        {"attention_bias": True, "head_dim": 64, "num_hidden_layers": 3, "hidden_size": 48},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "llama": ("Llama", {"head_dim": None}),
    "llama, llama3 rope, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mistral, heads as wide as the hidden size says": ("Mistral", {"sliding_window": 24, "head_dim": None}),
    "mistral, window shorter than a block": ("Mistral", {"sliding_window": 3}),
    "qwen2, windows by layer type": (
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, windows in the later layers": (
        "Qwen3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
    ),
}


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3, "the reference must not be so flat that everything agrees"


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = SHAPES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("model"), family, **overrides)


def test_whole_prompt_over_many_blocks(checkpoint: Path) -> None:
    ids = ids_of(150)
    (logits,) = ModelDriver(checkpoint).step((RequestState(), ids))
    assert_close(logits, reference_logits(checkpoint, ids))


@pytest.mark.parametrize(("first", "chunk"), [(100, 1), (0, 7), (0, 64)])
def test_prompt_in_chunks(checkpoint: Path, first: int, chunk: int) -> None:
    """The chunks behind the `first` tokens, which are one step."""
    ids = ids_of(130)
    driver, request = ModelDriver(checkpoint), RequestState()
    starts = [*range(bool(first)), *range(first, len(ids), chunk)]
    parts = [driver.step((request, ids[i:end])) for i, end in pairwise([*starts, len(ids)])]
    assert_close(torch.cat([part for (part,) in parts]), reference_logits(checkpoint, ids))


def test_mixed_batches(checkpoint: Path) -> None:
    """Requests of several lengths join at different times: decode rows and prompt slices in the same steps."""
    driver = ModelDriver(checkpoint, block_size=8)
    prompts = [ids_of(n, seed=n) for n in (40, 3, 17, 90, 1)]
    states = [RequestState() for _ in prompts]
    found: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(60):
        work = []
        for i, (state, ids) in enumerate(zip(states, prompts, strict=True)):
            left = ids[state.length :]
            if step >= 3 * i and left:
                work.append((i, left[: 1 if step % 3 else 5]))
        if not work:
            break
        work.sort(key=lambda item: len(item[1]) > 1 or states[item[0]].length == 0)
        outputs = driver.step(*((states[i], tokens) for i, tokens in work))
        for (i, _), logits in zip(work, outputs, strict=True):
            found[i].append(logits)
    for ids, state, parts in zip(prompts, states, found, strict=True):
        assert_close(torch.cat(parts), reference_logits(checkpoint, ids[: state.length]))


def test_shared_prefix(checkpoint: Path) -> None:
    """Two requests read the same blocks for their common prefix, one of them in the step that fills these blocks."""
    driver = ModelDriver(checkpoint, block_size=4)
    prefix, tails = ids_of(32), [ids_of(11, seed=1), ids_of(19, seed=2)]
    first = RequestState()
    for group in range(driver.kv_cache.spec.num_groups):
        driver.blocks.grow(first.tables[group], 32, 4)
    second = RequestState(length=32, tables={group: list(table) for group, table in first.tables.items()})
    logits_first, logits_second = driver.step((first, prefix + tails[0]), (second, tails[1]))
    assert_close(logits_first, reference_logits(checkpoint, prefix + tails[0]))
    assert_close(logits_second, reference_logits(checkpoint, prefix + tails[1])[32:])


def test_idle_step_computes_nothing(checkpoint: Path) -> None:
    assert ModelDriver(checkpoint).step() == []
