"""Rotary tables equal transformers', whose config files and formulas they follow, for every supported rope type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from checkpoints import tiny_model_config
from model_facts import rope_of
from nvcli.models.config import load_model_config
from nvcli.models.rope import RotaryTable

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 256},
    "yarn": YARN,
    "yarn, original length not given": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    "yarn, attention factor given": {**YARN, "attention_factor": 0.9},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, betas, not truncated": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_table_is_that_of_transformers(variant: str, head_dim: int, tmp_path: Path) -> None:
    arguments = tiny_model_config(head_dim=head_dim, rope_parameters=dict(VARIANTS[variant]))
    theirs = Qwen3Config(**arguments, architectures=["Qwen3ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    table = RotaryTable(rope_of(ours), head_dim, 512)
    table.derive(torch.device("cpu"))
    positions = torch.tensor([0, 1, 77, 300, 511], dtype=torch.int32)
    cos, sin = Qwen3RotaryEmbedding(theirs)(torch.empty(0), positions.unsqueeze(0))
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(table(positions), expected, atol=1e-6, rtol=1e-6)
