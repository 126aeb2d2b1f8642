"""Which kernel attends the prefill chunks of a kind of attention: the one that gives the same bits in every batch where
a run asks for it, else Hopper's own where it serves them, over an FP8 cache by way of copies in 16 bits, else the one
for all GPUs.

Hopper's own serves head sizes 64 and 128 in 16 bits, without windows, in blocks of a multiple of 64 tokens; its sibling
for shared segments does where the cache is in the model's type."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from nvcli.kernels.triton.attention_launch import AttentionShape
from nvcli.kernels.triton.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.prefill_scratch import ScratchPrefillAttention
from nvcli.kernels.triton.triton_version import why_slower

PrefillKernel: TypeAlias = PrefillAttention | ScratchPrefillAttention

HOPPER_NOTE = "prefill attention: the kernel for Hopper GPUs"
"""What the log says where that kernel was chosen."""
SCRATCH_NOTE = f"{HOPPER_NOTE}, over copies of FP8 keys and values in bfloat16"
"""What it says where that kernel attends to copies."""


def attends_prefixes(kernel: PrefillKernel) -> TypeGuard[PrefillAttention]:
    """Tell whether a kernel attends to prefixes that chunks share."""
    return isinstance(kernel, PrefillAttention) and kernel.kind is not PrefillKind.INVARIANT


def attends_segments(kernel: PrefillKernel) -> bool:
    """Tell whether the kernel for segments on Hopper GPUs serves a kind of attention whose chunks this kernel
    attends."""
    is_hopper = isinstance(kernel, PrefillAttention) and kernel.kind is PrefillKind.HOPPER
    return is_hopper and kernel.tile_key.group <= kernel.tile_key.rows


def prefill_kernel(
    shape: AttentionShape, *, has_window: bool, batch_invariant: bool, has_plain_blocks: bool, scratch_tokens: int
) -> tuple[PrefillKernel, list[str]]:
    """Make the kernel for one geometry, with windows or without; return it, and notes for the log.

    `has_plain_blocks`: a layer's blocks lie one behind the other, with nothing but scales between their keys.
    `scratch_tokens`: keys that copies of an FP8 cache have room for, a multiple of 64.
    """
    is_for_hopper = (
        not has_window
        and not batch_invariant
        and has_plain_blocks
        and shape.head_dim in (64, 128)
        and shape.block_size % 64 == 0
        and shape.dtype.itemsize == 2
        and (shape.kv_dtype == shape.dtype or (shape.is_fp8 and shape.dtype == torch.bfloat16))
        and torch.cuda.get_device_capability(shape.device) == (9, 0)
    )
    slower = why_slower() if is_for_hopper else None
    if slower is not None or not is_for_hopper:
        kind = PrefillKind.INVARIANT if batch_invariant else PrefillKind.USUAL
        return PrefillAttention(shape, kind), [] if slower is None else [slower]
    if shape.is_fp8:
        return ScratchPrefillAttention(shape, scratch_tokens=scratch_tokens), [SCRATCH_NOTE]
    return PrefillAttention(shape, PrefillKind.HOPPER), [HOPPER_NOTE]
