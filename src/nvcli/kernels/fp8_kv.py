"""Keys and values in FP8: e4m3 numbers with a bfloat16 scale for each token and head. Plain torch, which is the
reference for the Triton kernels that store and read them.

A head's scale is its largest number divided by 448, the largest e4m3 number, unless the checkpoint brings a scale for
the layer. Numbers beyond 448 × scale, which only a scale of the checkpoint leaves, become the nearest e4m3 number.
The scale of a head that holds NaN is NaN, so that a broken request is still found out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, FP8_MAX

SMALLEST_AMAX = 1e-30
"""Heads whose largest number is smaller are scaled as if it were this one: the scale of zeros must not be 0."""


class KVScales(NamedTuple):
    """The scales of one layer's keys and values in the pool, [num_blocks, num_kv_heads, block_size] bfloat16 each."""

    k: Tensor
    v: Tensor


def quantise_heads(x: Tensor, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise heads [..., D] → e4m3 [..., D] and scales [...] bfloat16. `static_scale`: one number, for all heads."""
    values = x.float()
    amax = values.abs().amax(-1)
    if static_scale is None:
        scale = amax.clamp_min(SMALLEST_AMAX) * (1 / FP8_MAX)
    else:
        scale = torch.where(amax.isfinite(), static_scale.float(), torch.nan)
    scale = scale.to(torch.bfloat16)
    scaled = values * (1.0 / scale.float()).unsqueeze(-1)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantise_heads(x: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that `quantise_heads` made of heads: [..., D] and [...] → [..., D] float32."""
    if x.is_cuda:
        return x.float() * scale.float().unsqueeze(-1)
    # On a CPU torch turns e4m3 numbers into others one by one. Their bits are those of a float16 that is 256 times
    # smaller, once the exponent has a fifth bit, below the sign. NaN would be a number, but its head's scale is NaN.
    bits = (x.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).float().mul_((256.0 * scale.float()).unsqueeze(-1))


def store_heads(
    cache: Tensor, scales: Tensor, slot_mapping: Tensor, rows: Tensor, static_scale: Tensor | None = None
) -> None:
    """Quantise rows [T, num_kv_heads, D] and write them, with their scales, to their places in a layer's cache.

    cache: [num_blocks, block_size, num_kv_heads, D] e4m3; scales: see `KVScales`; slot_mapping: [T] int64, block id ×
    block_size + offset.
    """
    block_size = cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    quantised, scale = quantise_heads(rows, static_scale)
    cache.view(torch.uint8)[blocks, offsets] = quantised.view(torch.uint8)
    scales.transpose(1, 2)[blocks, offsets] = scale


def gather_blocks(cache: Tensor, scales: Tensor | None, block_ids: Tensor, out: Tensor) -> Tensor:
    """Copy blocks [n] int64 of a layer's cache to `out` [n, block_size, num_kv_heads, D], in `out`'s type; return it.
    `scales` None: the cache is in no type that has them."""
    if scales is None:
        return out.copy_(cache.index_select(0, block_ids))
    numbers = cache.view(torch.uint8).index_select(0, block_ids).view(FP8)
    scale = scales.index_select(0, block_ids).transpose(1, 2)
    return out.copy_(dequantise_heads(numbers, scale))
