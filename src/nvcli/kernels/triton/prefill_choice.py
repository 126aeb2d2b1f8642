"""Which kernel attends the prefill chunks of a kind of attention: the one that gives the same bits in every batch where
a run asks for it, else Hopper's own where it serves them, over an FP8 cache by way of copies in 16 bits, else the one
for all GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton import invariant_attention, prefill_attention
from nvcli.kernels.triton.triton_version import why_slower

if TYPE_CHECKING:
    from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention
    from nvcli.kernels.triton.scratch_prefill import ScratchPrefillAttention

PrefillKernel: TypeAlias = (
    "prefill_attention.PrefillAttention | invariant_attention.PrefillAttention | HopperPrefillAttention"
    " | ScratchPrefillAttention"
)

PrefixKernel: TypeAlias = "prefill_attention.PrefillAttention | HopperPrefillAttention"
"""Those of them that attend to prefixes which chunks share."""

HOPPER_NOTE = "prefill attention: the kernel for Hopper GPUs"
"""What the log says where that kernel was chosen."""
SCRATCH_NOTE = f"{HOPPER_NOTE}, over copies of FP8 keys and values in bfloat16"
"""What it says where that kernel attends to copies."""


def attends_prefixes(kernel: PrefillKernel) -> TypeGuard[PrefixKernel]:
    """Tell whether a kernel attends to prefixes that chunks share."""
    return kernel.tile_key.scratch_units == 0 and not isinstance(kernel, invariant_attention.PrefillAttention)


def attends_segments(kernel: PrefillKernel) -> bool:
    """Tell whether `hopper_segments.py` serves a kind of attention whose chunks this kernel attends."""
    if isinstance(kernel, prefill_attention.PrefillAttention | invariant_attention.PrefillAttention):
        return False
    from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention

    key = kernel.tile_key
    return isinstance(kernel, HopperPrefillAttention) and key.group <= key.rows


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
    scratch_tokens: int,
) -> tuple[PrefillKernel, list[str]]:
    """Make the kernel for one geometry, with windows or without; return it, and notes for the log.

    `has_plain_blocks`: a layer's blocks lie one behind the other, with nothing but scales between their keys.
    `scratch_tokens`: keys that copies of an FP8 cache have room for, a multiple of 64.
    """
    is_for_hopper = (
        not has_window
        and not batch_invariant
        and has_plain_blocks
        and head_dim in (64, 128)
        and block_size % 64 == 0
        and dtype.itemsize == 2
        and (kv_dtype == dtype or (kv_dtype == FP8 and dtype == torch.bfloat16))
        and torch.cuda.get_device_capability(device) == (9, 0)
    )
    notes = []
    if is_for_hopper and (slower := why_slower()) is not None:
        is_for_hopper, notes = False, [slower]
    if is_for_hopper and kv_dtype == FP8:
        from nvcli.kernels.triton.scratch_prefill import ScratchPrefillAttention

        scratch = ScratchPrefillAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            scratch_tokens=scratch_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
        )
        return scratch, [SCRATCH_NOTE]
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
    return usual, notes
