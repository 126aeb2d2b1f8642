"""Which kernel attends the prefill chunks of a kind of attention: the one that gives the same bits in every batch where
a run asks for it, else Hopper's own where it serves them, else the one for all GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from nvcli.kernels.triton import invariant_attention, prefill_attention
from nvcli.kernels.triton.gluon_version import has_known_gluon

if TYPE_CHECKING:
    from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention

PrefillKernel: TypeAlias = (
    "prefill_attention.PrefillAttention | invariant_attention.PrefillAttention | HopperPrefillAttention"
)

HOPPER_NOTE = "prefill attention: the kernel for Hopper GPUs"
"""What the log says where that kernel was chosen."""


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
    has_plain_blocks: bool,
) -> tuple[PrefillKernel, list[str]]:
    """Make the kernel for one geometry, with windows or without; return it, and notes for the log.

    `has_plain_blocks`: a layer's blocks lie one behind the other, with nothing between their keys.
    """
    is_for_hopper = (
        not has_window
        and not batch_invariant
        and has_plain_blocks
        and head_dim in (64, 128)
        and block_size % 64 == 0
        and dtype.itemsize == 2
        and kv_dtype == dtype
        and torch.cuda.get_device_capability(device) == (9, 0)
        and has_known_gluon()
    )
    if is_for_hopper:
        from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention

        hopper = HopperPrefillAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, device=device
        )
        return hopper, [HOPPER_NOTE]
    kernel = invariant_attention.PrefillAttention if batch_invariant else prefill_attention.PrefillAttention
    usual = kernel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )
    return usual, []
