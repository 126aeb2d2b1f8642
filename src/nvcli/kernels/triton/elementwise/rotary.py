"""q/k norm, RoPE and the store into the paged cache in one kernel: a program for each token and a few of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_kv import KVScales
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.patch_types import HeadNorms
from nvcli.kernels.rotary import split_heads
from nvcli.kernels.triton.attention.fp8_kv import quantise_heads, scale_pointers
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_HEADS_PER_PROGRAM = 16
"""Measured on an H200 with 16 query and 8 KV heads: 1.75 us for one token, 2.4 for 256 and 38.5 for 8,192 where rotated
keys go to the cache alone; 43.7 for 8,192 where qkv holds them, too. With 32 and 8 heads: 55.5 and 60.4 for 8,192."""


@triton.jit
def _norm_and_turn(
    first, second, weight_ptr, cos, sin, eps, halves, inside,
    HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, NORM_LAST: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads: [heads, D/2] float32 each → the same, normed if there is a weight, and turned by the
    angles where ROTATE. With NORM_LAST the norm's weight, all of a norm that a rotation changes, comes after the
    rotation."""
    if weight_ptr is not None:
        mean_square = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        scale = tl.rsqrt(mean_square + eps)[:, None]
        first_weight = tl.load(weight_ptr + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight_ptr + HEAD_DIM // 2 + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
        first, second = first * scale, second * scale
        if not NORM_LAST:
            first, second = first * first_weight, second * second_weight
    if ROTATE:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if weight_ptr is not None and NORM_LAST:
        first, second = first * first_weight, second * second_weight
    return first, second


@triton.jit
def _load_heads(source, angles, first_mask, second_mask, inside, HALF: tl.constexpr):
    """Load both halves of some heads in float32, and the angles by which they are turned, if there are any."""
    first = tl.load(source, mask=first_mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=second_mask, other=0.0).to(tl.float32)
    if angles is not None:
        cos = tl.load(angles, mask=inside, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=inside, other=0.0)[None, :]
    else:
        cos, sin = 1.0, 0.0
    return first, second, cos, sin


@triton.jit
def _norm_rope_queries(
    source_row, target_row, weight_ptr, angles, eps, group, halves, inside,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NORM_LAST: tl.constexpr,
):  # fmt: skip
    """Norm and turn a group of a token's queries, from one row to another."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = group * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    mask = (heads < NUM_HEADS)[:, None] & inside[None, :]
    offsets = heads[:, None] * HEAD_DIM + halves[None, :]
    first, second, cos, sin = _load_heads(source_row + offsets, angles, mask, mask, inside, HALF)
    first, second = _norm_and_turn(
        first, second, weight_ptr, cos, sin, eps, halves, inside, HEAD_DIM, angles is not None, NORM_LAST
    )
    target = target_row + offsets
    tl.store(target, first.to(target_row.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(target_row.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope_kernel(
    heads_ptr,  # [T, NUM_HEADS, HEAD_DIM], tokens row_stride apart
    cos_sin_ptr,  # None: heads are not rotated
    weight_ptr,  # None: heads are not normed
    out_ptr,  # [T, NUM_HEADS, HEAD_DIM], written
    eps,
    row_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, group of heads)."""
    token = tl.program_id(0).to(tl.int64)
    halves = tl.arange(0, triton.next_power_of_2(HEAD_DIM // 2))
    angles = None if cos_sin_ptr is None else cos_sin_ptr + token * HEAD_DIM + halves
    await_kernel_before(DEPENDENT)
    _norm_rope_queries(
        heads_ptr + token * row_stride, out_ptr + token * (NUM_HEADS * HEAD_DIM), weight_ptr, angles, eps,
        tl.program_id(1), halves, halves < HEAD_DIM // 2, NUM_HEADS, HEAD_DIM, HEADS_PER_PROGRAM, NORM_LAST,
    )  # fmt: skip


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr,
    cos_sin_ptr,  # None: heads are not rotated
    q_weight_ptr,  # None: heads are not normed; and so the next one
    k_weight_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    static_scales_ptr,  # [2] float32, the scales of all keys and of all values in an FP8 cache; None: each its own
    eps,
    qkv_row_stride,
    cache_slot_stride,
    cache_block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # numbers of a value, up to HEAD_DIM
    VALUE_FACTOR: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots of a block that lies apart from the next; 0: blocks lie one behind the other
    KEEP_KEYS: tl.constexpr,  # what is stored goes back into qkv as well
    DEPENDENT: tl.constexpr,
):
    """Program (token, group of heads); groups of q come first, then those of k and v."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    halves = tl.arange(0, triton.next_power_of_2(HALF))
    inside = halves < HALF
    ROTATE: tl.constexpr = cos_sin_ptr is not None
    angles = cos_sin_ptr + token * HEAD_DIM + halves if ROTATE else None
    qkv_row = qkv_ptr + token * qkv_row_stride
    await_kernel_before(DEPENDENT)
    if group < Q_GROUPS:
        _norm_rope_queries(
            qkv_row, q_out_ptr + token * (NUM_HEADS * HEAD_DIM), q_weight_ptr, angles, eps,
            group, halves, inside, NUM_HEADS, HEAD_DIM, HEADS_PER_PROGRAM, NORM_LAST,
        )  # fmt: skip
    else:
        # Heads of k and behind them those of v, which are not turned.
        heads = (group - Q_GROUPS) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
        mask = (heads < 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
        is_key = heads < NUM_KV_HEADS
        first_mask, second_mask, column = mask, mask, heads * HEAD_DIM
        if VALUE_DIM < HEAD_DIM:
            first_mask = mask & (is_key[:, None] | (halves < VALUE_DIM)[None, :])
            second_mask = mask & (is_key[:, None] | (halves + HALF < VALUE_DIM)[None, :])
            column = tl.where(is_key, column, NUM_KV_HEADS * HEAD_DIM + (heads - NUM_KV_HEADS) * VALUE_DIM)
        source = qkv_row + NUM_HEADS * HEAD_DIM + column[:, None] + halves[None, :]
        first, second, cos, sin = _load_heads(source, angles, first_mask, second_mask, inside, HALF)
        slot = tl.load(slot_mapping_ptr + token)
        place = slot * cache_slot_stride
        if BLOCK_SIZE:
            place = slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
        k_first, k_second = _norm_and_turn(
            first, second, k_weight_ptr, cos, sin, eps, halves, inside, HEAD_DIM, ROTATE, NORM_LAST
        )
        if NORM_VALUES:
            scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
            first, second = first * scale, second * scale
        if VALUE_FACTOR != 1.0:
            first, second = first * VALUE_FACTOR, second * VALUE_FACTOR
        # Rounded once, to the model's type; the cache may hold another.
        stored_first = tl.where(is_key[:, None], k_first, first).to(qkv_ptr.dtype.element_ty)
        stored_second = tl.where(is_key[:, None], k_second, second).to(qkv_ptr.dtype.element_ty)
        if KEEP_KEYS:
            is_changed = mask if NORM_VALUES or VALUE_FACTOR != 1.0 else mask & is_key[:, None]
            tl.store(source, stored_first, mask=first_mask & is_changed)
            tl.store(source + HALF, stored_second, mask=second_mask & is_changed)
        cache = tl.where(is_key, k_cache_ptr, v_cache_ptr)[:, None]
        cached = cache + (place + heads % NUM_KV_HEADS * HEAD_DIM)[:, None] + halves[None, :]
        if k_cache_ptr.dtype.element_ty == tl.float8e4nv:
            STATIC: tl.constexpr = static_scales_ptr is not None
            static_scale = 1.0
            if STATIC:
                static_scale = tl.load(static_scales_ptr + tl.where(is_key, 0, 1))
            stored_first, stored_second, scale = quantise_heads(
                stored_first.to(tl.float32), stored_second.to(tl.float32), static_scale, STATIC
            )
            block, offset, kv_head = slot // BLOCK_SIZE, slot % BLOCK_SIZE, heads % NUM_KV_HEADS
            k_scales = scale_pointers(
                k_cache_ptr, block, offset, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, cache_block_stride
            )
            v_scales = scale_pointers(
                v_cache_ptr, block, offset, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, cache_block_stride
            )
            tl.store(tl.where(is_key, k_scales, v_scales), scale, mask=heads < 2 * NUM_KV_HEADS)
        tl.store(cached, stored_first.to(k_cache_ptr.dtype.element_ty), mask=first_mask)
        tl.store(cached + HALF, stored_second.to(k_cache_ptr.dtype.element_ty), mask=second_mask)


def norm_rope(
    heads: Tensor, cos_sin: Tensor | None, weight: Tensor | None, eps: float, *, norms_last: bool = False
) -> Tensor:
    """See `nvcli.kernels.rotary.norm_rope`. A token's heads are contiguous → [T, heads, D], contiguous."""
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride()[1:] == (head_dim, 1)
    assert cos_sin is None or (cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim)
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    heads_per_program, block_half = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads)), next_power_of_2(head_dim // 2)
    _norm_rope_kernel[(num_tokens, ceil_div(num_heads, heads_per_program))](
        heads,
        cos_sin,
        weight,
        out,
        eps,
        heads.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PER_PROGRAM=heads_per_program,
        NORM_LAST=norms_last,
        **dependent(heads.device),
        num_warps=max(1, heads_per_program * block_half // 256),
    )
    return out


def qk_norm_rope_store(
    qkv: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    keep_keys: bool,
    norms_last: bool = False,
    norms_values: bool = False,
    value_factor: float = 1.0,
    scales: KVScales | None = None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `nvcli.kernels.rotary.qk_norm_rope_store`. k and v are views of `qkv`; kept ones are changed in place. The
    scales of an FP8 cache are found behind its keys and values."""
    num_tokens, head_dim, value_dim = qkv.shape[0], k_cache.shape[-1], v_cache.shape[-1]
    block_size = k_cache.shape[1]
    is_dense = k_cache.stride(0) == block_size * k_cache.stride(1)
    assert qkv.stride(1) == 1
    assert not norms_values or value_dim == head_dim
    assert cos_sin is None or (cos_sin.is_contiguous() and cos_sin.shape[1] == head_dim)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[2:] == (head_dim, 1)
    assert (k_cache.dtype == FP8) == (scales is not None)
    assert scales is None or not is_dense, "the scales stand between the blocks"
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    heads_per_program = min(_HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    num_groups = ceil_div(num_heads, heads_per_program) + ceil_div(2 * num_kv_heads, heads_per_program)
    block_half = next_power_of_2(head_dim // 2)
    _qk_norm_rope_store_kernel[(num_tokens, num_groups)](
        qkv,
        cos_sin,
        q_weight,
        k_weight,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        static_scales,
        eps,
        qkv.stride(0),
        k_cache.stride(1),
        k_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        VALUE_FACTOR=value_factor,
        HEADS_PER_PROGRAM=heads_per_program,
        NORM_LAST=norms_last,
        NORM_VALUES=norms_values,
        BLOCK_SIZE=0 if is_dense else block_size,
        KEEP_KEYS=keep_keys,
        **dependent(qkv.device),
        num_warps=max(1, heads_per_program * block_half // 256),  # 16 elements a thread
    )
    _, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)
    return q, k if keep_keys else None, v


@triton.jit
def _rotate_kernel(
    qkv_ptr,  # [T, 3, NUM_HEADS, HEAD_DIM], queries and keys are written, and values with NORM_VALUES
    cos_sin_ptr,  # [T, HEAD_DIM] float32
    q_weight_ptr,  # [HEAD_DIM], the weight of the queries' norm; None: heads are not normed
    k_weight_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, triton.next_power_of_2(2 * NUM_HEADS))[:, None]
    halves = tl.arange(0, triton.next_power_of_2(HALF))
    inside = halves < HALF
    mask = (heads < 2 * NUM_HEADS) & inside[None, :]
    source = qkv_ptr + token * (3 * NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM + halves[None, :]
    await_kernel_before(DEPENDENT)
    angles = cos_sin_ptr + token * HEAD_DIM + halves
    first, second, cos, sin = _load_heads(source, angles, mask, mask, inside, HALF)
    if q_weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.where(heads < NUM_HEADS, q_weight_ptr, k_weight_ptr) + halves[None, :]
        first *= scale * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(source, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(source + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    if NORM_VALUES:
        heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
        mask = (heads < NUM_HEADS) & inside[None, :]
        source = qkv_ptr + (3 * token + 2) * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM + halves[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        tl.store(source, (first * scale).to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(source + HALF, (second * scale).to(qkv_ptr.dtype.element_ty), mask=mask)


def rotate_patches(qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None = None) -> None:
    """See `nvcli.kernels.patch_attention.rotate_patches`."""
    num_patches, _, num_heads, head_dim = qkv.shape
    assert qkv.is_contiguous()
    assert cos_sin.is_contiguous()
    block_heads, block_half = next_power_of_2(2 * num_heads), next_power_of_2(head_dim // 2)
    _rotate_kernel[(num_patches,)](
        qkv,
        cos_sin,
        None if norms is None else norms.queries,
        None if norms is None else norms.keys,
        0.0 if norms is None else norms.eps,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        NORM_VALUES=norms is not None and norms.of_values,
        **dependent(qkv.device),
        num_warps=max(1, min(8, block_heads * block_half // 256)),
    )
