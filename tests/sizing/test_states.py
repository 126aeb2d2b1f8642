"""What recurrent states take is counted: blocks as large as a state, memory, and the work of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_runners import engine_config
from nvcli.job.planning.job_time import Lengths, gpu_speed, replica_seconds
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.kv_groups import block_bytes, group_bytes
from nvcli.sizing.costs import model_costs
from nvcli.sizing.kv_cache import (
    blocks_held,
    blocks_of_request,
    default_block_size,
    max_blocks,
    requests_held,
    state_blocks,
    tokens_in,
)
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.profile.profile import profile_from_config
from nvcli.tools.profile.report import format_profile


def shape(name: str, folder: Path) -> ModelConfig:
    return load_model_config(write_shape(name, folder))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3-next-80b-a3b", 256), ("qwen3.5-9b", 128), ("qwen3.5-27b", 192), ("qwen3.5-35b-a3b", 192)],
)
def test_a_block_is_about_as_large_as_a_state(name: str, tokens: int, tmp_path: Path) -> None:
    """So little is wasted where keys lie in a block, or a state. flash-attn 2 takes multiples of 256."""
    model = shape(name, tmp_path)
    assert default_block_size(model, "bfloat16", "bfloat16", "auto") == tokens
    assert default_block_size(model, "bfloat16", "bfloat16", "flash-attn:triton") == 256
    keys, state = group_bytes(model, "bfloat16", block_size=tokens)
    assert block_bytes(model, "bfloat16", block_size=tokens) < 1.1 * min(keys, state)


def test_models_without_states_have_blocks_of_64_tokens(tmp_path: Path) -> None:
    for name in ("qwen3-0.6b", "gemma-3-27b", "gpt-oss-20b"):
        model = shape(name, tmp_path)
        assert group_bytes(model, "bfloat16", block_size=64)[1] == 0
        assert default_block_size(model, "bfloat16", "bfloat16", "auto") == 64
        assert default_block_size(model, "bfloat16", "bfloat16", "flash-attn") == 256


def test_each_request_takes_its_states_however_long_it_is(tmp_path: Path) -> None:
    model = shape("qwen3.5-35b-a3b", tmp_path)
    config = engine_config(max_model_len=19_200, block_size=192, max_num_seqs=10, dtype="bfloat16")
    assert state_blocks(model) == 15, "30 layers, two to a group"
    assert [blocks_of_request(config, model, length) for length in (1, 192, 193, 19_200)] == [16, 16, 17, 115]
    assert max_blocks(config, model) == 1 + 10 * (115 + 15), "and one more to keep of each prompt"
    assert blocks_held(config, model, 2.5) == 2.5 + 15
    num_tokens = tokens_in(1001 * block_bytes(model, "bfloat16", block_size=192), config, model)
    assert num_tokens == 1000 * 19_200 // 115
    assert requests_held(num_tokens, config, model, 19_200) == pytest.approx(1000 / 115, rel=1e-3)
    assert requests_held(num_tokens, config, model, 960) == pytest.approx(1000 / 20, rel=1e-3)


def test_a_profile_says_what_states_take(tmp_path: Path) -> None:
    lines = {}
    for name in ("qwen3.5-35b-a3b", "qwen3-8b"):
        model = shape(name, tmp_path)
        config = engine_config(max_model_len=4096, block_size=192, dtype="bfloat16", max_num_seqs=100)
        profile = profile_from_config(config, model, name, total=140 << 30, lengths=None)
        lines[name] = [line for line in format_profile(profile).splitlines() if "recurrent states" in line]
    assert lines["qwen3-8b"] == []
    (line,) = lines["qwen3.5-35b-a3b"]
    assert "15 blocks (61.41 MiB) per request, however long it is; with max_num_seqs requests 29 %" in line


def test_the_time_of_a_job_counts_them(tmp_path: Path) -> None:
    """Requests of Qwen3.5-9B that end one by one read and write as many bytes of states as of weights."""
    model, speed = shape("qwen3.5-9b", tmp_path), gpu_speed("NVIDIA H200")
    config = engine_config(max_model_len=4096, block_size=128, dtype="bfloat16", max_num_seqs=256)
    costs = model_costs(model, "bfloat16")
    seconds = replica_seconds(model, config, speed, 256, 1e9, Lengths(prompt=1, computed=1, answer=1000))
    weights = 2000 * (costs.layers.num_bytes + costs.lm_head.num_bytes)
    states = 256 * 1000 * costs.state_bytes_per_row
    assert seconds > (weights + states) / speed.bytes_per_second
