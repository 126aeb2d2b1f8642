"""What recurrent states take is counted: blocks as large as a state, memory, and the work of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.bench.shapes import write_shape
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.kv_groups import block_bytes, group_bytes
from nvcli.sizing.kv_cache import default_block_size


def shape(name: str, folder: Path) -> ModelConfig:
    return load_model_config(write_shape(name, folder))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3-next-80b-a3b", 256), ("qwen3.5-9b", 128), ("qwen3.5-27b", 192), ("qwen3.5-35b-a3b", 192)],
)
def test_a_block_is_about_as_large_as_a_state(name: str, tokens: int, tmp_path: Path) -> None:
    """So little is wasted where keys lie in a block, or a state. flash-attn 2 takes multiples of 256."""
    model = shape(name, tmp_path)
    assert default_block_size(model, "bfloat16", "auto") == tokens
    assert default_block_size(model, "bfloat16", "flash-attn:triton") == 256
    token, state = group_bytes(model, "bfloat16")
    assert block_bytes(model, "bfloat16", block_size=tokens) < 1.1 * min(tokens * token, state)


def test_models_without_states_have_blocks_of_64_tokens(tmp_path: Path) -> None:
    for name in ("qwen3-0.6b", "gemma-3-27b", "gpt-oss-20b"):
        model = shape(name, tmp_path)
        assert group_bytes(model, "bfloat16")[1] == 0
        assert default_block_size(model, "bfloat16", "auto") == 64
        assert default_block_size(model, "bfloat16", "flash-attn") == 256
