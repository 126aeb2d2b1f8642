"""Shapes of attention that tests make kernels for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nvcli.kernels.triton.attention.attention_launch import AttentionShape

_SHAPE = AttentionShape(
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=64,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


def attention_shape(**change: Any) -> AttentionShape:
    """Two KV heads of 64 for four query heads each, in bfloat16 and blocks of 64, but for what is changed."""
    return replace(_SHAPE, **change)
