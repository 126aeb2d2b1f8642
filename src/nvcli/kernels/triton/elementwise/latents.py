"""Latent attention's norm, rotary positions and store into the paged cache in one kernel: a program for each token and
some of its heads, and one for its key."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.triton.attention.fp8_kv import divide_by_scale, scale_pointers
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_HEADS_PER_PROGRAM = 16


@triton.jit
def _turn(source, mask, angles, inside, pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rotated numbers as pairs, and turn them by the angles, unless they are None: → first and second of each
    pair, float32."""
    if INTERLEAVED:
        first = tl.load(source + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + pair + HALF, mask=mask, other=0.0).to(tl.float32)
    if angles is not None:
        cos = tl.load(angles + pair, mask=inside, other=0.0)
        sin = tl.load(angles + HALF + pair, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    return first, second


@triton.jit(do_not_specialize=["num_absorbed"])
def _rotate_and_store_kernel(
    queries_ptr,  # [T, NUM_HEADS, PLAIN + ROPE], tokens query_stride apart
    latents_ptr,  # [T, LATENT + ROPE], rows latent_stride apart
    cos_sin_ptr,  # [T, ROPE] float32, or None: nothing is rotated
    absorbed_ptr,  # [num_absorbed, NUM_HEADS, LATENT + ROPE], whose last ROPE numbers are written
    cache_ptr,  # blocks cache_block_stride apart, written, with the scales of numbers in e4m3
    slot_mapping_ptr,
    weight_ptr,  # [LATENT]
    eps,
    query_stride,
    latent_stride,
    cache_block_stride,
    num_absorbed,  # the queries of tokens from here on are rotated where they stand
    HEADS: tl.constexpr,  # `LatentHeads`
    PROGRAM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,  # elements from one token to the next
    DEPENDENT: tl.constexpr,
):
    """Program (token, part): the first part is the token's key, and the others are PROGRAM_HEADS query heads
    each."""
    NUM_HEADS: tl.constexpr = HEADS.num_heads
    PLAIN: tl.constexpr = HEADS.plain_dim
    ROPE: tl.constexpr = HEADS.rope_dim
    LATENT: tl.constexpr = HEADS.latent_dim
    INTERLEAVED: tl.constexpr = HEADS.is_interleaved
    HALF: tl.constexpr = ROPE // 2
    KEY: tl.constexpr = LATENT + ROPE
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angles = None if cos_sin_ptr is None else cos_sin_ptr + token * ROPE
    await_kernel_before(DEPENDENT)
    if part == 0:
        key_pair = tl.arange(0, triton.next_power_of_2(max(1, HALF)))
        is_pair = key_pair < HALF
        latent_row = latents_ptr + token * latent_stride
        numbers = tl.arange(0, triton.next_power_of_2(LATENT))
        is_latent = numbers < LATENT
        latent = tl.load(latent_row + numbers, mask=is_latent, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + numbers, mask=is_latent, other=0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps) * weight
        key_first, key_second = _turn(latent_row + LATENT, is_pair, angles, is_pair, key_pair, HALF, INTERLEAVED)
        slot = tl.load(slot_mapping_ptr + token)
        place = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * CACHE_ROW
        if cache_ptr.dtype.element_ty == tl.float8e4nv:
            normed = tl.where(is_latent, normed, 0.0)
            amax = tl.max(tl.abs(normed), axis=0)
            amax = tl.maximum(amax, tl.max(tl.where(is_pair, tl.abs(key_first), 0.0), axis=0))
            amax = tl.maximum(amax, tl.max(tl.where(is_pair, tl.abs(key_second), 0.0), axis=0))
            normed, scale = divide_by_scale(normed, amax)
            key_first, scale = divide_by_scale(key_first, amax)
            key_second, scale = divide_by_scale(key_second, amax)
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            tl.store(scale_pointers(cache_ptr, block, offset, 0, 1, KEY, BLOCK_SIZE, cache_block_stride), scale)
        tl.store(place + numbers, normed.to(cache_ptr.dtype.element_ty), mask=is_latent)
        tl.store(place + LATENT + key_pair, key_first.to(cache_ptr.dtype.element_ty), mask=is_pair)
        tl.store(place + LATENT + HALF + key_pair, key_second.to(cache_ptr.dtype.element_ty), mask=is_pair)
    else:
        pair = tl.arange(0, triton.next_power_of_2(max(1, HALF)))[None, :]
        inside = pair < HALF
        heads = ((part - 1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS))[:, None]
        mask = (heads < NUM_HEADS) & inside
        source = queries_ptr + token * query_stride + heads * (PLAIN + ROPE) + PLAIN
        first, second = _turn(source, mask, angles, inside, pair, HALF, INTERLEAVED)
        target = source + pair
        if token < num_absorbed:
            target = absorbed_ptr + (token * NUM_HEADS + heads) * KEY + LATENT + pair
        tl.debug_barrier()  # all threads have loaded what another one overwrites
        tl.store(target, first.to(absorbed_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, second.to(absorbed_ptr.dtype.element_ty), mask=mask)


def rotate_and_store(
    queries: Tensor,
    latents: Tensor,
    cos_sin: Tensor | None,
    absorbed: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    heads: LatentHeads,
    *,
    weight: Tensor,
    eps: float,
) -> None:
    """See `nvcli.kernels.latents.rotate_and_store`."""
    _, block_size, _, key_dim = cache.shape
    query_dim = heads.plain_dim + heads.rope_dim
    assert key_dim == heads.latent_dim + heads.rope_dim
    assert queries.stride()[1:] == (query_dim, 1)
    assert latents.stride(1) == 1
    assert cos_sin is None or cos_sin.is_contiguous()
    assert absorbed.is_contiguous()
    assert cache.stride(3) == 1
    of_program = min(_HEADS_PER_PROGRAM, next_power_of_2(heads.num_heads))
    _rotate_and_store_kernel[(len(queries), 1 + ceil_div(heads.num_heads, of_program))](
        queries,
        latents,
        cos_sin,
        absorbed,
        cache,
        slot_mapping,
        weight,
        eps,
        queries.stride(0),
        latents.stride(0),
        cache.stride(0),
        len(absorbed),
        HEADS=heads,
        PROGRAM_HEADS=of_program,
        BLOCK_SIZE=block_size,
        CACHE_ROW=cache.stride(1),
        **dependent(cache.device),
    )
