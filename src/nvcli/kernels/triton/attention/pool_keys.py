"""Index keys of pools of neighbouring tokens, and the positions of the keys of chosen pools: a program for each token
that fills a pool, and one for each token and a part of its chosen keys.

Shapes: T tokens, K most keys of a token, E numbers of an index key, P keys of a pool.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chosen_keys import TokenKeys
from nvcli.kernels.pool_settings import Pools
from nvcli.kernels.whole_numbers import ceil_div

_PLACES = 1024
"""The chosen keys that a program lists."""


@triton.jit
def _keys_of_pool(
    count, table, block_stride: tl.int64, POOL: tl.constexpr, BLOCK_SIZE: tl.constexpr, CACHE_ROW: tl.constexpr
):
    """Return lanes, which of them are keys of the pool that the last of `count` keys fills, and where these are."""
    lane = tl.arange(0, triton.next_power_of_2(POOL))
    is_key = lane < POOL
    position = count - POOL + tl.where(is_key, lane, 0)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    return lane, is_key, block * block_stride + position % BLOCK_SIZE * CACHE_ROW


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables"])
def _pool_keys_kernel(
    cache,  # blocks cache_block_stride apart, tokens CACHE_ROW: key, gates, and the pool's key, which is written
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    bias,  # [POOL, SIZE] float32
    cache_block_stride: tl.int64,
    table_stride,
    SIZE: tl.constexpr,
    POOL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    if (count == 0) | (count % POOL != 0):
        return
    table = tables + tl.load(slots + token) * table_stride
    lane, is_key, place = _keys_of_pool(count, table, cache_block_stride, POOL, BLOCK_SIZE, CACHE_ROW)
    number = tl.arange(0, triton.next_power_of_2(SIZE))
    is_number = number < SIZE
    inside = is_key[:, None] & is_number[None, :]
    key = tl.load(cache + place[:, None] + number[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(cache + place[:, None] + SIZE + number[None, :], mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(bias + lane[:, None] * SIZE + number[None, :], mask=inside, other=0.0)
    gate = tl.where(is_key[:, None], gate, -float("inf"))
    share = tl.exp(gate - tl.max(gate, 0)[None, :])
    share = (share / tl.sum(share, 0)[None, :]).to(cache.dtype.element_ty).to(tl.float32)
    last = tl.sum(tl.where(lane == POOL - 1, place, 0), 0)
    pooled = tl.sum(share * key, 0)
    tl.store(cache + last + 2 * SIZE + number, pooled.to(cache.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables"])
def _average_keys_kernel(
    cache,  # blocks cache_block_stride apart, tokens CACHE_ROW: key, and angles, or the pool's key, which is written
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    weight,  # [SIZE]
    eps,
    cache_block_stride: tl.int64,
    table_stride,
    SIZE: tl.constexpr,
    POOL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
):
    """Program (token). The halves of a key, which are rotated as pairs, are computed side by side."""
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    if (count == 0) | (count % POOL != 0):
        return
    table = tables + tl.load(slots + token) * table_stride
    lane, is_key, place = _keys_of_pool(count, table, cache_block_stride, POOL, BLOCK_SIZE, CACHE_ROW)
    number = tl.arange(0, triton.next_power_of_2(HALF))
    is_number = number < HALF
    inside = is_key[:, None] & is_number[None, :]
    keys = cache + place[:, None] + number[None, :]
    dtype = cache.dtype.element_ty
    a = tl.sum(tl.load(keys, mask=inside, other=0.0).to(tl.float32), 0) / POOL
    b = tl.sum(tl.load(keys + HALF, mask=inside, other=0.0).to(tl.float32), 0) / POOL
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    factor = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / SIZE + eps)
    a *= factor * tl.load(weight + number, mask=is_number, other=0.0).to(tl.float32)
    b *= factor * tl.load(weight + HALF + number, mask=is_number, other=0.0).to(tl.float32)
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    first = cache + tl.sum(tl.where(lane == 0, place, 0), 0) + SIZE + number
    cosine = tl.load(first, mask=is_number, other=0.0).to(tl.float32)
    sine = tl.load(first + HALF, mask=is_number, other=0.0).to(tl.float32)
    last = cache + tl.sum(tl.where(lane == POOL - 1, place, 0), 0) + SIZE + number
    tl.store(last, (a * cosine - b * sine).to(dtype), mask=is_number)
    tl.store(last + HALF, (b * cosine + a * sine).to(dtype), mask=is_number)


@triton.jit
def _expand_pools_kernel(
    pools,  # [T, MOST] int32, rows pool_stride apart
    seen,  # [T] int32
    chosen,  # [T, TOP_K] int32, rows chosen_stride apart, written
    pool_stride,
    chosen_stride,
    MOST: tl.constexpr,
    TOP_K: tl.constexpr,
    POOLS: tl.constexpr,  # `Pools`
    PLACES: tl.constexpr,
):
    """Program (token, PLACES of its chosen keys)."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    POOL: tl.constexpr = POOLS.size
    num_pools = tl.maximum(count - POOLS.num_last, 0) // POOL
    in_pools = tl.minimum(num_pools, MOST) * POOL
    total = in_pools + count - num_pools * POOL
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    pool = tl.load(pools + token * pool_stride + place // POOL, mask=place < in_pools, other=0)
    position = tl.where(place < in_pools, pool * POOL + place % POOL, num_pools * POOL + place - in_pools)
    tl.store(chosen + token * chosen_stride + place, position, mask=(place < total) & (place < TOP_K))


def pool_keys(cache: Tensor, tokens: TokenKeys, bias: Tensor) -> None:
    """See `nvcli.kernels.chosen_keys.pool_keys`."""
    pool, size = bias.shape
    assert bias.is_contiguous()
    assert cache.stride(2) == tokens.tables.stride(1) == 1
    _pool_keys_kernel[(len(tokens.seen),)](
        cache,
        *tokens,
        bias,
        cache.stride(0),
        tokens.tables.stride(0),
        SIZE=size,
        POOL=pool,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
    )


def average_keys(cache: Tensor, tokens: TokenKeys, weight: Tensor, eps: float, pool: int) -> None:
    """See `nvcli.kernels.chosen_keys.average_keys`."""
    assert cache.stride(2) == tokens.tables.stride(1) == 1
    _average_keys_kernel[(len(tokens.seen),)](
        cache,
        *tokens,
        weight,
        eps,
        cache.stride(0),
        tokens.tables.stride(0),
        SIZE=len(weight),
        POOL=pool,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
    )


def expand_pools(chosen_pools: Tensor, tokens: TokenKeys, chosen: Tensor, pools: Pools) -> None:
    """See `nvcli.kernels.chosen_keys.expand_pools`."""
    num_tokens, top_k = chosen.shape
    assert chosen_pools.stride(1) == chosen.stride(1) == 1
    _expand_pools_kernel[num_tokens, ceil_div(top_k, _PLACES)](
        chosen_pools,
        tokens.seen,
        chosen,
        chosen_pools.stride(0),
        chosen.stride(0),
        MOST=chosen_pools.shape[1],
        TOP_K=top_k,
        POOLS=pools,
        PLACES=_PLACES,
    )
