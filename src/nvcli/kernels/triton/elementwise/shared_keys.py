"""The norms, rotary positions and store of keys that are values, too, in one kernel, a program for each token and some
of its heads, and one for its key; and another that rotates heads by their tokens' angles, or back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.fp8_kv import divide_by_scale, scale_pointers
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_and_turn(
    heads, exists, weight_ptr, angles, eps,
    PLAIN: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Load heads from where `heads` [n, 1] point, norm them, by a weight unless that is None, and turn their last
    numbers: → plain numbers [n, PLAIN], first and second of each pair [n, ROPE / 2], both rounded up, float32."""
    HALF: tl.constexpr = ROPE // 2
    number = tl.arange(0, triton.next_power_of_2(max(1, PLAIN)))[None, :]
    pair = tl.arange(0, triton.next_power_of_2(ROPE // 2))[None, :]
    is_plain, is_pair = number < PLAIN, pair < HALF
    plain = tl.load(heads + number, mask=exists & is_plain, other=0.0).to(tl.float32)
    first = tl.load(heads + PLAIN + 2 * pair, mask=exists & is_pair, other=0.0).to(tl.float32)
    second = tl.load(heads + PLAIN + 2 * pair + 1, mask=exists & is_pair, other=0.0).to(tl.float32)
    squares = tl.sum(plain * plain, axis=1) + tl.sum(first * first + second * second, axis=1)
    scale = tl.rsqrt(squares / (PLAIN + ROPE) + eps)[:, None]
    plain, first, second = plain * scale, first * scale, second * scale
    if weight_ptr is not None:
        plain *= tl.load(weight_ptr + number, mask=is_plain, other=0.0).to(tl.float32)
        first *= tl.load(weight_ptr + PLAIN + 2 * pair, mask=is_pair, other=0.0).to(tl.float32)
        second *= tl.load(weight_ptr + PLAIN + 2 * pair + 1, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(angles + pair, mask=is_pair, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=is_pair, other=0.0)
    return plain, first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store(
    heads, exists, plain, first, second,
    PLAIN: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Write heads to where `heads` [n, 1] point, the first of all pairs before the second ones."""
    number = tl.arange(0, triton.next_power_of_2(max(1, PLAIN)))[None, :]
    pair = tl.arange(0, triton.next_power_of_2(ROPE // 2))[None, :]
    dtype = heads.dtype.element_ty
    tl.store(heads + number, plain.to(dtype), mask=exists & (number < PLAIN))
    is_pair = exists & (pair < ROPE // 2)
    tl.store(heads + PLAIN + pair, first.to(dtype), mask=is_pair)
    tl.store(heads + PLAIN + ROPE // 2 + pair, second.to(dtype), mask=is_pair)


@triton.jit
def _norm_rotate_store_kernel(
    queries_ptr,  # [T, NUM_HEADS, PLAIN + ROPE], written
    keys_ptr,  # [T, PLAIN + ROPE], rows key_stride apart
    cos_sin_ptr,  # [T, ROPE] float32
    cache_ptr,  # blocks cache_block_stride apart, written, with the scales of numbers in e4m3
    slot_mapping_ptr,
    weight_ptr,  # [PLAIN + ROPE]
    eps,
    key_stride,
    cache_block_stride,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,  # elements from one token to the next
    DEPENDENT: tl.constexpr,
):
    """Program (token, part): the first part is the token's key, and the others are HEADS query heads each."""
    SIZE: tl.constexpr = PLAIN + ROPE
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angles = cos_sin_ptr + token * ROPE
    await_kernel_before(DEPENDENT)
    if part == 0:
        key = tl.arange(0, 1)[:, None]
        key_plain, key_first, key_second = _norm_and_turn(
            keys_ptr + token * key_stride + key, key == 0, weight_ptr, angles, eps, PLAIN, ROPE
        )
        slot = tl.load(slot_mapping_ptr + token)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if cache_ptr.dtype.element_ty == tl.float8e4nv:
            amax = tl.maximum(tl.max(tl.abs(key_plain), axis=1), tl.max(tl.abs(key_first), axis=1))
            amax = tl.maximum(amax, tl.max(tl.abs(key_second), axis=1))[:, None]
            key_plain, scale = divide_by_scale(key_plain, amax)
            key_first, scale = divide_by_scale(key_first, amax)
            key_second, scale = divide_by_scale(key_second, amax)
            place = scale_pointers(cache_ptr, block, offset, key, 1, SIZE, BLOCK_SIZE, cache_block_stride)
            tl.store(place, scale)
        target = cache_ptr + block * cache_block_stride + offset * CACHE_ROW + key
        _store(target, key == 0, key_plain, key_first, key_second, PLAIN, ROPE)
    else:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        heads, exists = queries_ptr + (token * NUM_HEADS + head) * SIZE, head < NUM_HEADS
        plain, first, second = _norm_and_turn(heads, exists, None, angles, eps, PLAIN, ROPE)
        tl.debug_barrier()  # all threads have loaded what another one overwrites
        _store(heads, exists, plain, first, second, PLAIN, ROPE)


@triton.jit
def _turn_kernel(
    heads_ptr,  # [T, NUM_HEADS, SIZE], whose last ROPE numbers are written
    cos_sin_ptr,  # [T, ROPE] float32
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    IS_BACK: tl.constexpr,  # by the negative of each angle, from the order of pairs (i, i + ROPE / 2) to neighbours
    DEPENDENT: tl.constexpr,
):
    """Program (token, HEADS heads)."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    is_pair = pair < HALF
    mask = (head < NUM_HEADS) & is_pair
    tails = heads_ptr + (token * NUM_HEADS + head) * SIZE + SIZE - ROPE
    neighbours, halves = tails + 2 * pair, tails + pair
    await_kernel_before(DEPENDENT)
    cos = tl.load(cos_sin_ptr + token * ROPE + pair, mask=is_pair, other=0.0)
    sin = tl.load(cos_sin_ptr + token * ROPE + HALF + pair, mask=is_pair, other=0.0)
    if IS_BACK:
        sin = -sin
    first = tl.load(halves if IS_BACK else neighbours, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(halves + HALF if IS_BACK else neighbours + 1, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have loaded what another one overwrites
    dtype = heads_ptr.dtype.element_ty
    tl.store(neighbours if IS_BACK else halves, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(neighbours + 1 if IS_BACK else halves + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def norm_rotate_store(
    queries: Tensor,
    keys: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    eps: float,
) -> None:
    """See `nvcli.kernels.shared_keys.norm_rotate_store`."""
    num_tokens, num_heads, size = queries.shape
    rope = cos_sin.shape[1]
    assert queries.is_contiguous()
    assert cos_sin.is_contiguous()
    assert keys.shape == (num_tokens, size)
    assert keys.stride(1) == cache.stride(3) == 1
    of_program = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    _norm_rotate_store_kernel[(num_tokens, 1 + ceil_div(num_heads, of_program))](
        queries,
        keys,
        cos_sin,
        cache,
        slot_mapping,
        weight,
        eps,
        keys.stride(0),
        cache.stride(0),
        NUM_HEADS=num_heads,
        PLAIN=size - rope,
        ROPE=rope,
        HEADS=of_program,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
        **dependent(cache.device),
    )


def turn(heads: Tensor, cos_sin: Tensor) -> None:
    """See `nvcli.kernels.shared_keys.turn`."""
    _turn(heads, cos_sin, is_back=False)


def turn_back(results: Tensor, cos_sin: Tensor) -> None:
    """See `nvcli.kernels.shared_keys.turn_back`."""
    _turn(results, cos_sin, is_back=True)


def _turn(heads: Tensor, cos_sin: Tensor, *, is_back: bool) -> None:
    num_tokens, num_heads, size = heads.shape
    assert heads.is_contiguous()
    assert cos_sin.is_contiguous()
    of_program = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    _turn_kernel[(num_tokens, ceil_div(num_heads, of_program))](
        heads,
        cos_sin,
        NUM_HEADS=num_heads,
        SIZE=size,
        ROPE=cos_sin.shape[1],
        HEADS=of_program,
        IS_BACK=is_back,
        **dependent(heads.device),
    )
