"""The choice of the prefill kernel for a kind of attention: the batch-invariant one where a run asks for it, else
Hopper's own where it serves (over 16-bit copies of an FP8 cache), else the one for all GPUs.

Hopper's own serves head sizes 64, 128 and 256 (copies: 64 and 128) in 16 bits, without windows or later tokens, in
blocks of a multiple of 64 tokens. Where it reads a cache with heads of up to 128 itself, its sibling for shared
segments serves decode rows."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from nvcli.kernels.triton.attention.attention_launch import AttentionShape
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_scratch import UNIT, ScratchPrefillAttention, ScratchTiles
from nvcli.kernels.triton.attention.prefill_tiles import Chunks, PrefillTiles, TileKey, TilePart
from nvcli.kernels.triton.attention.projected_prefill import ProjectedHeads, ProjectedPrefill
from nvcli.kernels.triton.launch.triton_version import why_slower

PrefillKernel: TypeAlias = PrefillAttention | ScratchPrefillAttention

HOPPER_NOTE = "prefill attention: the kernel for Hopper GPUs"
"""The note in the log where that kernel was chosen."""
SCRATCH_NOTE = f"{HOPPER_NOTE}, over copies of FP8 keys and values in bfloat16"
"""The note where that kernel reads copies."""


def attends_prefixes(kernel: PrefillKernel) -> TypeGuard[PrefillAttention]:
    """Tell whether a kernel can attend to prefixes that chunks share."""
    return isinstance(kernel, PrefillAttention) and kernel.kind is not PrefillKind.INVARIANT


def attends_segments(kernel: PrefillKernel) -> bool:
    """Tell whether Hopper's kernel for segments serves the kind of attention that this prefill kernel serves."""
    if not isinstance(kernel, PrefillAttention) or kernel.kind is not PrefillKind.HOPPER:
        return False
    return kernel.shape.head_dim <= 128 and kernel.tile_key.group <= kernel.tile_key.rows


def prefill_kernel(
    shape: AttentionShape,
    *,
    has_window: bool,
    both_ways: bool,
    batch_invariant: bool,
    has_plain_blocks: bool,
    has_whole_rows: bool,
    scratch_tokens: int,
) -> tuple[PrefillKernel, list[str]]:
    """Make the kernel for one geometry, with windows or without; return it, and notes for the log.

    `both_ways`: tokens see those after them, too.
    `has_plain_blocks`: a layer's blocks lie one behind the other, with nothing but scales between their keys.
    `has_whole_rows`: from one block to the next it is a whole number of tokens' keys.
    `scratch_tokens`: keys that copies of an FP8 cache have room for, a multiple of 64.
    """
    copies = shape.is_fp8 and shape.dtype == torch.bfloat16 and has_plain_blocks and shape.head_dim in (64, 128)
    reads = shape.kv_dtype == shape.dtype and has_whole_rows and shape.head_dim in (64, 128, 256)
    is_for_hopper = (
        not has_window
        and not both_ways
        and not batch_invariant
        and (copies or reads)
        and shape.tail_dim == 0
        and not shape.has_bias
        and shape.block_size % 64 == 0
        and shape.dtype.itemsize == 2
        and torch.cuda.get_device_capability(shape.device) == (9, 0)
    )
    slower = why_slower() if is_for_hopper else None
    if slower is not None or not is_for_hopper:
        kind = PrefillKind.INVARIANT if batch_invariant else PrefillKind.USUAL
        return PrefillAttention(shape, kind), [] if slower is None else [slower]
    if shape.is_fp8:
        return ScratchPrefillAttention(shape, scratch_tokens=scratch_tokens), [SCRATCH_NOTE]
    return PrefillAttention(shape, PrefillKind.HOPPER), [HOPPER_NOTE]


def projected_prefill(shape: AttentionShape, heads: ProjectedHeads, *, scratch_tokens: int) -> ProjectedPrefill | None:
    """Make the kernels that attend chunks to projected latents, for sizes that they serve; None where a GPU or the
    cache has none.

    `shape`: that of absorbed queries and the cache. `scratch_tokens`: keys that there is room for, a multiple of 64.
    """
    serves = (
        shape.head_dim % 64 == 0
        and shape.block_size % UNIT.value == 0
        and shape.dtype.itemsize == 2
        and (shape.kv_dtype == shape.dtype or (shape.is_fp8 and shape.dtype == torch.bfloat16))
        and torch.cuda.get_device_capability(shape.device) == (9, 0)
        and why_slower() is None
    )
    return ProjectedPrefill(shape, heads, scratch_tokens=scratch_tokens) if serves else None


class TileLists:
    """The tile lists of a run; kernels with equal tiles share one.

    max_tokens, max_chunks: the most of a step, padding included.
    """

    def __init__(self, *, max_tokens: int, max_chunks: int, device: torch.device) -> None:
        self._max_tokens, self._max_chunks, self._device = max_tokens, max_chunks, device
        self._lists: dict[tuple[TileKey, TilePart], PrefillTiles] = {}

    def of(self, kernel: PrefillKernel | ProjectedPrefill, part: TilePart = TilePart.WHOLE) -> PrefillTiles:
        """Return the list of a kernel's tiles over a part of the keys."""
        key = kernel.tile_key
        if part in (TilePart.PREFIX, TilePart.REST):  # those of prefixes are sorted by their keys as they are
            key = key._replace(is_sorted=False)
        if (key, part) not in self._lists:
            sizes = {"max_tokens": self._max_tokens, "max_chunks": self._max_chunks}
            made = (
                ScratchTiles(key, **sizes, device=self._device)
                if key.scratch_units
                else PrefillTiles(key, **sizes, device=self._device, part=part)
            )
            self._lists[key, part] = made
        return self._lists[key, part]

    def plan(self, chunks: Chunks) -> None:
        """List the tiles of a step, and those of prefixes where chunks share any."""
        for (_, part), tiles in self._lists.items():
            if part is TilePart.WHOLE or chunks.prefixes is not None:
                tiles.plan(chunks)
