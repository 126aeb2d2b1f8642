"""Which kernel attends the prefill chunks of a kind of attention: Hopper's own where it serves them, else the one for
all GPUs."""

from __future__ import annotations

import torch

from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention
from nvcli.kernels.triton.prefill_attention import PrefillAttention


def prefill_attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    has_window: bool,
) -> PrefillAttention | HopperPrefillAttention:
    """Make the kernel for one geometry, with windows or without."""
    if not has_window and HopperPrefillAttention.serves(
        head_dim=head_dim, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, device=device
    ):
        return HopperPrefillAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, device=device
        )
    return PrefillAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )
