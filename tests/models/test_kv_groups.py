"""KV groups: every layer is in one of them, stages agree on them, and blocks are counted as they are held."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import tiny_model_config, write_tiny_model
from family_shapes import SHAPES
from model_facts import windows_of
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.core.messages import MAX_KV_GROUPS, KVGroup
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.kv_groups import block_bytes, blocks_needed, kv_groups, layer_specs
from nvcli.worker.distributed.stage import Stage


def model_of(path: Path, windows: list[int | None], **overrides: Any) -> ModelConfig:
    """A Qwen3 model with windows by layer."""
    window = next((one for one in windows if one is not None), None)
    types = ["full_attention" if one is None else "sliding_attention" for one in windows]
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        **tiny_model_config(num_hidden_layers=len(windows), **overrides),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
    }
    (path / "config.json").write_text(json.dumps(values))
    config = load_model_config(path)
    assert windows_of(config) == tuple(windows)
    return config


def test_layers_that_attend_alike_are_one_group(tmp_path: Path) -> None:
    assert kv_groups(model_of(tmp_path, [None] * 5)) == (KVGroup(None, layers=(0, 1, 2, 3, 4)),)
    assert kv_groups(model_of(tmp_path, [16] * 3)) == (KVGroup(16, layers=(0, 1, 2)),)
    assert kv_groups(model_of(tmp_path, [16, None] * 2)) == (KVGroup(16, layers=(0, 2)), KVGroup(None, layers=(1, 3)))


@pytest.mark.parametrize(
    ("num_windows", "num_full", "sizes"),
    [
        (18, 18, [18, 18]),
        (22, 4, [4, 4, 4, 4, 3, 3, 4]),  # 5 : 1, as in Gemma 3
        (14, 15, [14, 15]),
        (1, 27, [1, 9, 9, 9]),
    ],
)
def test_groups_are_few_and_nearly_full(num_windows: int, num_full: int, sizes: list[int], tmp_path: Path) -> None:
    groups = kv_groups(model_of(tmp_path, [16] * num_windows + [None] * num_full))
    assert [len(group.layers) for group in groups] == sizes


def test_there_are_never_more_groups_than_a_step_has_room_for(tmp_path: Path) -> None:
    """One layer of full attention among many with a window would make a group of each of them."""
    for num_windows, num_full in ((120, 1), (5, 400), (97, 3)):
        groups = kv_groups(model_of(tmp_path, [16] * num_windows + [None] * num_full))
        assert len(groups) <= MAX_KV_GROUPS
        assert sum(len(group.layers) for group in groups) == num_windows + num_full


def test_every_layer_is_in_one_group_of_its_stage(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(30):
        windows = [rng.choice([None, None, 16]) for _ in range(rng.randrange(3, 40))]
        model = model_of(tmp_path, windows)
        whole = kv_groups(model)
        for count in (1, 2, 3):
            for index in range(count):
                stage = Stage(index, count)
                groups = kv_groups(model, stage)
                assert [group.window for group in groups] == [group.window for group in whole]
                held = stage.layers(len(windows))
                assert sorted(n for group in groups for n in group.layers) == list(range(len(held)))
                for group in groups:
                    assert all(windows[held.start + number] == group.window for number in group.layers)
                    assert list(group.layers) == sorted(group.layers)


def test_a_stage_without_layers_of_a_kind_has_the_group_all_the_same(tmp_path: Path) -> None:
    model = model_of(tmp_path, [None, None, 16, 16])
    assert kv_groups(model, Stage(0, 2)) == (KVGroup(None, layers=(0, 1)), KVGroup(16, layers=()))


def test_blocks_hold_the_layers_of_one_group(tmp_path: Path) -> None:
    """2 KV heads of 16; float32."""
    per_layer = 2 * 2 * 16 * 4
    assert block_bytes(model_of(tmp_path, [None] * 4), "float32", block_size=8) == 4 * 8 * per_layer
    mixed = model_of(tmp_path, [None, 16] * 2)
    assert block_bytes(mixed, "float32", block_size=8) == 2 * 8 * per_layer
    assert block_bytes(mixed, "bfloat16", block_size=8, tensor_parallel_size=2) == 8 * per_layer // 2
    assert block_bytes(mixed, "float32", block_size=8, stage=Stage(0, 2)) == 8 * per_layer


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_groups_of_other_shapes_fill_blocks_of_equal_bytes(tp: int, tmp_path: Path) -> None:
    """Gemma 4 31B: 50 layers of 16 KV heads × 256, and 10 of 4 × 512, which take half as many bytes."""
    keys = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": None,
        "sliding_window": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({**tiny_model_config(num_hidden_layers=60), **keys}))
    config = load_model_config(tmp_path)
    groups = kv_groups(config)
    assert [(group.window, len(group.layers)) for group in groups] == [(64, 5)] * 10 + [(None, 10)]
    specs = layer_specs(config, tp)
    spec = KVCacheSpec.of_layers(specs, tuple(group.layers for group in groups), block_size=8, dtype=torch.bfloat16)
    assert not spec.is_uniform
    planned = block_bytes(config, "bfloat16", block_size=8, tensor_parallel_size=tp)
    assert planned == spec.block_bytes == 5 * 8 * 2 * 2 * 16 // tp * 256
    cache = KVCache(spec, 3, torch.device("cpu"))
    for group in groups:
        for number in group.layers:
            for tensor in cache.layer(number):
                assert tensor.shape == (3, 8, specs[number].num_kv_heads, specs[number].head_dim)
                tensor[1] = 1
        assert (cache.data[1] == 1).all() or tp == 4, "the layers of a group fill a block"
        assert not cache.data[::2].any(), "and no other"
        cache.clear(torch.tensor([1]))
        assert not cache.data.any()


def test_a_window_keeps_its_blocks_and_those_of_a_chunk(tmp_path: Path) -> None:
    full, windows = model_of(tmp_path, [None] * 2), model_of(tmp_path, [16] * 2)
    assert [blocks_needed(full, n, block_size=8, chunk=32) for n in (1, 8, 9, 400)] == [1, 1, 2, 50]
    assert [blocks_needed(windows, n, block_size=8, chunk=1) for n in (1, 8, 17, 400)] == [1, 1, 3, 3]
    assert blocks_needed(windows, 400, block_size=8, chunk=32) == 7  # 47 tokens, the first in the middle of a block
    mixed = model_of(tmp_path, [None, 16])
    assert blocks_needed(mixed, 400, block_size=8, chunk=1) == 50 + 3


def test_no_more_blocks_are_needed_than_are_held(tmp_path: Path) -> None:
    """Walk through sequences in chunks: what a step's tokens see lies in as many blocks as were said, at most."""
    rng = random.Random(1)
    for _ in range(200):
        window, block_size, chunk = rng.randrange(2, 60), rng.randrange(1, 20), rng.randrange(1, 50)
        model = model_of(tmp_path, [window])
        length, num_tokens, most = 0, rng.randrange(1, 300), 0
        while length < num_tokens:
            end = min(num_tokens, length + rng.randrange(1, chunk + 1))
            first = max(0, length - (window - 1))
            most = max(most, (end - 1) // block_size - first // block_size + 1)
            length = end
        assert most <= blocks_needed(model, num_tokens, block_size=block_size, chunk=chunk)


@pytest.mark.parametrize("tp", [1, 2])
def test_states_have_blocks_of_their_own(tp: int, tmp_path: Path) -> None:
    """A state is a group with a window of two tokens, and is as large in plans as in the pool."""
    family, overrides = SHAPES["qwen 3.5"]
    config = load_model_config(write_tiny_model(tmp_path, family, **overrides))
    groups = kv_groups(config)
    assert [group for group in groups if not group.is_state] == [KVGroup(None, layers=(2, 4))]
    states = [group for group in groups if group.is_state]
    assert sorted(layer for group in states for layer in group.layers) == [0, 1, 3]
    assert all(group.window == 2 for group in states)
    layers, group_layers = layer_specs(config, tp), tuple(group.layers for group in groups)
    for block_size in (1, 4, 64):
        spec = KVCacheSpec.of_layers(layers, group_layers, block_size=block_size, dtype=torch.bfloat16)
        planned = block_bytes(config, "bfloat16", block_size=block_size, tensor_parallel_size=tp)
        assert spec.block_bytes == planned
        cache = KVCache(spec, 3, torch.device("cpu"))
        conv, recurrent = cache.state(1, layers[1].kv_group)
        assert conv.shape == (3, 3, 96 // tp)
        assert recurrent.shape == (3, 4 // tp, 8, 16)
        recurrent[1], conv[1] = 2.0, 3.0
        assert all(part[block].count_nonzero() == 0 for part in (conv, recurrent) for block in (0, 2))
        assert (recurrent[1] == 2.0).all(), "conv inputs lie where the state does"
        cache.clear(torch.tensor([1]))
        assert conv.count_nonzero() == recurrent.count_nonzero() == 0
    assert blocks_needed(config, 1000, block_size=4, chunk=1) == 250 + len(states)
