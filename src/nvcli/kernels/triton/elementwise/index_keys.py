"""The index keys of sparse attention in one kernel: their norm (LayerNorm), rotation and store into the paged cache,
and the rotation of index queries. A program for each token and some of its heads, and one for its key."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_HEADS_PER_PROGRAM = 16


@triton.jit
def _turn(first, second, angles, pair, is_pair, HALF: tl.constexpr):
    """Turn pairs by the angles, unless they are None."""
    if angles is not None:
        cos = tl.load(angles + pair, mask=is_pair, other=0.0)
        sin = tl.load(angles + HALF + pair, mask=is_pair, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    return first, second


@triton.jit(do_not_specialize=["num_queries"])
def _store_index_keys_kernel(
    queries_ptr,  # [num_queries, NUM_HEADS, SIZE], contiguous, rotated in place
    keys_ptr,  # [T, SIZE], rows key_stride apart
    gates_ptr,  # None, or the same, stored behind the keys
    cos_sin_ptr,  # [T, ROPE] float32, or None: nothing is rotated
    cache_ptr,  # blocks cache_block_stride apart, tokens CACHE_ROW, written
    slot_mapping_ptr,
    weight_ptr,  # [SIZE]
    bias_ptr,  # [SIZE]
    eps,
    key_stride,
    cache_block_stride,
    num_queries,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, part): the first part is the token's key, and the others are HEADS query heads each."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angles = None if cos_sin_ptr is None else cos_sin_ptr + token * ROPE
    pair = tl.arange(0, triton.next_power_of_2(max(1, HALF)))
    first_place = 2 * pair if INTERLEAVED else pair
    second_place = 2 * pair + 1 if INTERLEAVED else pair + HALF
    await_kernel_before(DEPENDENT)
    if part == 0:
        numbers = tl.arange(0, triton.next_power_of_2(SIZE))
        is_number = numbers < SIZE
        key_row = keys_ptr + token * key_stride
        values = tl.load(key_row + numbers, mask=is_number, other=0.0).to(tl.float32)
        mean = tl.sum(values, axis=0) / SIZE
        centered = tl.where(is_number, values - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centered * centered, axis=0) / SIZE + eps)
        weight = tl.load(weight_ptr + numbers, mask=is_number, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + numbers, mask=is_number, other=0.0).to(tl.float32)
        slot = tl.load(slot_mapping_ptr + token)
        place = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * CACHE_ROW
        normed = (centered * factor * weight + bias).to(keys_ptr.dtype.element_ty)
        tl.store(place + numbers, normed.to(cache_ptr.dtype.element_ty), mask=is_number & (numbers >= ROPE))
        if gates_ptr is not None:
            gates = tl.load(gates_ptr + token * key_stride + numbers, mask=is_number, other=0.0)
            tl.store(place + SIZE + numbers, gates.to(cache_ptr.dtype.element_ty), mask=is_number)
        is_pair = pair < HALF
        first = tl.load(key_row + first_place, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(key_row + second_place, mask=is_pair, other=0.0).to(tl.float32)
        first_weight = tl.load(weight_ptr + first_place, mask=is_pair, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + second_place, mask=is_pair, other=0.0).to(tl.float32)
        first_bias = tl.load(bias_ptr + first_place, mask=is_pair, other=0.0).to(tl.float32)
        second_bias = tl.load(bias_ptr + second_place, mask=is_pair, other=0.0).to(tl.float32)
        first = ((first - mean) * factor * first_weight + first_bias).to(keys_ptr.dtype.element_ty)
        second = ((second - mean) * factor * second_weight + second_bias).to(keys_ptr.dtype.element_ty)
        first, second = _turn(first.to(tl.float32), second.to(tl.float32), angles, pair, is_pair, HALF)
        tl.store(place + pair, first.to(cache_ptr.dtype.element_ty), mask=is_pair)
        tl.store(place + HALF + pair, second.to(cache_ptr.dtype.element_ty), mask=is_pair)
    elif cos_sin_ptr is not None and token < num_queries:
        heads = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        row = queries_ptr + (token * NUM_HEADS + heads) * SIZE
        is_turned = (heads < NUM_HEADS) & (pair < HALF)[None, :]
        one = tl.load(row + first_place[None, :], mask=is_turned, other=0.0).to(tl.float32)
        other = tl.load(row + second_place[None, :], mask=is_turned, other=0.0).to(tl.float32)
        one, other = _turn(one, other, angles, pair[None, :], (pair < HALF)[None, :], HALF)
        tl.debug_barrier()  # all threads have loaded what another one overwrites
        tl.store(row + pair[None, :], one.to(queries_ptr.dtype.element_ty), mask=is_turned)
        tl.store(row + HALF + pair[None, :], other.to(queries_ptr.dtype.element_ty), mask=is_turned)


def store_index_keys(
    queries: Tensor,
    keys: Tensor,
    cos_sin: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    is_interleaved: bool,
    gates: Tensor | None = None,
) -> None:
    """See `nvcli.kernels.chosen_keys.store_index_keys`."""
    num_queries, num_heads, size = queries.shape
    assert queries.is_contiguous()
    assert keys.stride(1) == 1
    assert gates is None or gates.stride() == keys.stride()
    assert cos_sin is None or cos_sin.is_contiguous()
    assert cache.stride(2) == 1
    rope = 0 if cos_sin is None else cos_sin.shape[1]
    of_program = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    _store_index_keys_kernel[(len(keys), 1 + ceil_div(num_heads, of_program))](
        queries,
        keys,
        gates,
        cos_sin,
        cache,
        slot_mapping,
        weight,
        bias,
        eps,
        keys.stride(0),
        cache.stride(0),
        num_queries,
        NUM_HEADS=num_heads,
        SIZE=size,
        ROPE=rope,
        HEADS=of_program,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
        INTERLEAVED=is_interleaved,
        **dependent(cache.device),
    )
