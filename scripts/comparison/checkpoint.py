"""Checkpoints of known shapes with made-up weights, which every engine can load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from nvcli.demo import demo_path
from nvcli.tools.bench.shapes import SHAPES as REAL_SHAPES

_SMALL = {
    **REAL_SHAPES["qwen3-0.6b"],
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}

SHAPES: dict[str, dict[str, Any]] = {"qwen3-30m": _SMALL, **REAL_SHAPES}
"""The shapes of `nvcli bench`, and one for CPUs: 29.4 M parameters."""


def write_checkpoint(shape: str, folder: Path, dtype: str) -> Path:
    """Random weights, alike in every run. With a tokenizer, because some engines want one; nothing reads its text."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    values = {key: value for key, value in SHAPES[shape].items() if key not in ("architectures", "torch_dtype")}
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model = Qwen3ForCausalLM(Qwen3Config(**values, dtype=dtype))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / name, folder / name)
    return folder
