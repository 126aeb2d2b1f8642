"""Which kernel attends the prefill chunks of a kind of attention: the one that gives the same bits in every batch where
a run asks for it, else Hopper's own where it serves them, else the one for all GPUs."""

from __future__ import annotations

import torch

from nvcli.kernels.triton import invariant_attention, prefill_attention
from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention

PrefillKernel = prefill_attention.PrefillAttention | HopperPrefillAttention | invariant_attention.PrefillAttention


def prefill_kernel(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    has_window: bool,
    batch_invariant: bool,
) -> PrefillKernel:
    """Make the kernel for one geometry, with windows or without."""
    is_for_hopper = not (batch_invariant or has_window) and HopperPrefillAttention.serves(
        head_dim=head_dim, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, device=device
    )
    if is_for_hopper:
        return HopperPrefillAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, device=device
        )
    kernel = invariant_attention.PrefillAttention if batch_invariant else prefill_attention.PrefillAttention
    return kernel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )


def note_of(kernel: PrefillKernel) -> list[str]:
    """Return what the log says of a kernel."""
    return ["prefill attention: the kernel for Hopper GPUs"] if isinstance(kernel, HopperPrefillAttention) else []
