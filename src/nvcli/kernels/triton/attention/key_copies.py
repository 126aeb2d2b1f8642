"""Copies keys and values of some tokens from one block of the cache to another: a program for each copy, its keys or
its values in one layer, and a few of its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_kv import KVScales
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_PROGRAM_NUMBERS = 4096
"""The approximate number of elements that a program copies: 32 for each thread."""


@triton.jit
def _copy_keys_kernel(
    k_cache_ptr,
    v_cache_ptr,
    scales,  # `KVScales`; None: there are none
    copies_ptr,
    block_stride,
    scale_block_stride,
    layer_stride: tl.int64,
    scale_layer_stride: tl.int64,
    TOKEN_NUMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Program (copy, some tokens of a block, keys or values of a layer); many have nothing to do, as most copies are
    shorter than a block."""
    copy = copies_ptr + tl.program_id(0) * FIELDS
    first, end = tl.load(copy + 2), tl.load(copy + 3)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_copied = (tokens >= first) & (tokens < end)
    source, target = tl.load(copy).to(tl.int64), tl.load(copy + 1).to(tl.int64)
    is_key = tl.program_id(2) % 2 == 0
    layer = (tl.program_id(2) // 2).to(tl.int64)
    cache = tl.where(is_key, k_cache_ptr, v_cache_ptr) + layer * layer_stride
    numbers = tl.arange(0, triton.next_power_of_2(TOKEN_NUMBERS))
    places = tokens[:, None] * TOKEN_NUMBERS + numbers[None, :]
    mask = is_copied[:, None] & (numbers < TOKEN_NUMBERS)[None, :]
    tl.store(cache + target * block_stride + places, tl.load(cache + source * block_stride + places, mask=mask), mask)
    if scales is not None:
        scales_ptr = tl.where(is_key, scales.k, scales.v) + layer * scale_layer_stride
        heads = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))
        places = heads[:, None] * BLOCK_SIZE + tokens[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & is_copied[None, :]
        found = tl.load(scales_ptr + source * scale_block_stride + places, mask=mask)
        tl.store(scales_ptr + target * scale_block_stride + places, found, mask)


def copy_keys(
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales | None,
    copies: Tensor,
    *,
    num_layers: int = 1,
    layer_stride: int = 0,
) -> None:
    """See `nvcli.kernels.key_copies.copy_keys`. The copies are made in `num_layers` layers: the given cache is that of
    the first, and the others follow `layer_stride` elements apart (bytes where there are scales)."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    token_numbers = num_kv_heads * head_dim
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[1:] == (token_numbers, head_dim, 1)
    assert copies.is_contiguous()
    assert scales is None or scales.k.stride() == scales.v.stride()
    assert scales is None or scales.k.stride()[1:] == (block_size, 1)
    if k_cache.dtype == FP8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    tokens = max(1, min(_PROGRAM_NUMBERS // next_power_of_2(token_numbers), next_power_of_2(block_size)))
    _copy_keys_kernel[(len(copies), ceil_div(block_size, tokens), 2 * num_layers)](
        k_cache,
        v_cache,
        scales,
        copies,
        k_cache.stride(0),
        0 if scales is None else scales.k.stride(0),
        layer_stride,
        layer_stride // 2,
        TOKEN_NUMBERS=token_numbers,
        TOKENS=tokens,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        FIELDS=copies.shape[1],
    )
