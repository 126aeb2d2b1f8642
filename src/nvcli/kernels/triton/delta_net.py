"""The gated delta rule in Triton. A program has some columns of one head's state, which it alone reads and writes: for
rows of one token it is one pass over them; for chunks the program goes through the row's tokens, 32 at a time.

The triangular system of a chunk is solved by its inverse, which is put together from blocks: that of [[A, 0], [C, B]]
is [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]. From blocks of 1 to half a chunk, each size takes two products for all blocks at once,
and unlike the series of powers of a triangular matrix none of them grows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.delta_types import DeltaGates, DeltaHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.state_rows import row_arguments, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_NORM_EPS = tl.constexpr(1e-6)
_STEP_TILE, _STEP_WARPS = 32, 4
_CHUNK_TILE, _CHUNK_WARPS = 64, 8
_CHUNK_LEVELS = 5
"""A chunk has 2^5 tokens: with 64 the compiler keeps many more values in memory that registers do not hold."""


@triton.jit
def _decay(step, log_rate, step_bias):
    """The logarithm of a token's decay: -exp(log_rate) × softplus(step + step_bias)."""
    x = step + step_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(log_rate) * softplus


@triton.jit(do_not_specialize=["first_row"])
def _step_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS]
    beta_ptr,  # [T, VALUE_HEADS], rows beta_stride apart
    step_ptr,  # [T, VALUE_HEADS], rows step_stride apart
    log_rate_ptr,  # [VALUE_HEADS]
    step_bias_ptr,  # [VALUE_HEADS]
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    slots_ptr,  # [R] int64
    seq_lens_ptr,  # [R] int32
    starts_ptr,  # [R + 1] int32
    places_ptr,  # [T] int64
    tables_ptr,  # [slots, max_blocks] int32, rows table_stride apart
    table_stride,
    first_row,
    qkv_stride,
    beta_stride,
    step_stride,
    pool_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Program (row, value head, tile of the state's columns). KEY_TILE is the next power of two of KEY_DIM."""
    row = tl.program_id(0) + first_row
    head = tl.program_id(1)
    token, _, _, source = row_of(row, slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, KEY_TILE)
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    qkv_ptr += token.to(tl.int64) * qkv_stride
    q = tl.load(qkv_ptr + key_head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + (KEY_HEADS + key_head) * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j, mask=in_value, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)
    beta = tl.sigmoid(tl.load(beta_ptr + token.to(tl.int64) * beta_stride + head).to(tl.float32))
    decay = _decay(
        tl.load(step_ptr + token.to(tl.int64) * step_stride + head).to(tl.float32),
        tl.load(log_rate_ptr + head).to(tl.float32),
        tl.load(step_bias_ptr + head).to(tl.float32),
    )
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0) * tl.exp(decay)
    written = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * written[None, :]
    out = tl.sum(state * q[:, None], 0)
    out_ptr += (token.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM
    tl.store(out_ptr + j, out.to(out_ptr.dtype.element_ty), mask=in_value)
    target = tl.load(places_ptr + token) // BLOCK_SIZE
    tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))


@triton.jit
def _unit_lower_inverse(lower, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹ of a matrix of 2^LEVELS rows and columns that is zero on and above the diagonal."""
    SIZE: tl.constexpr = 1 << LEVELS
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    # Blocks of one number are their own inverses, so the first size needs no product.
    inverse -= tl.where((i % 2 == 1) & (j == i - 1), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        size = 1 << level
        between = tl.where(((i // size) % 2 == 1) & (j // size == i // size - 1), lower, 0.0)
        product = tl.dot(inverse, between, input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["first_row"])
def _chunk_kernel(
    qkv_ptr,  # as in _step_kernel
    beta_ptr,
    step_ptr,
    log_rate_ptr,
    step_bias_ptr,
    pool_ptr,
    out_ptr,
    slots_ptr,
    seq_lens_ptr,
    starts_ptr,
    places_ptr,
    tables_ptr,
    table_stride,
    first_row,
    qkv_stride,
    beta_stride,
    step_stride,
    pool_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (row - first_row, value head, tile of the state's columns). Chunks end where blocks do."""
    row = tl.program_id(0) + first_row
    head = tl.program_id(1)
    start, end, before, source = row_of(row, slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, KEY_TILE)
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    CHUNK: tl.constexpr = 1 << LEVELS
    n = tl.arange(0, CHUNK)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    log_rate = tl.load(log_rate_ptr + head).to(tl.float32)
    step_bias = tl.load(step_bias_ptr + head).to(tl.float32)
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    first = start
    while first < end:
        offset = (before + first - start) % BLOCK_SIZE
        count = tl.minimum(tl.minimum(CHUNK, BLOCK_SIZE - offset), end - first)
        is_token = n < count
        token = (first + n).to(tl.int64)
        # Behind the chunk everything is zero: such tokens write nothing and decay nothing.
        row_ptrs = qkv_ptr + token[:, None] * qkv_stride
        key_mask = is_token[:, None] & in_key[None, :]
        value_mask = is_token[:, None] & in_value[None, :]
        q = tl.load(row_ptrs + key_head * KEY_DIM + i[None, :], mask=key_mask, other=0.0).to(tl.float32)
        k = tl.load(row_ptrs + (KEY_HEADS + key_head) * KEY_DIM + i[None, :], mask=key_mask, other=0.0).to(tl.float32)
        value_column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
        v = tl.load(row_ptrs + value_column[None, :], mask=value_mask, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 1) + _NORM_EPS)[:, None] * scale
        k *= tl.rsqrt(tl.sum(k * k, 1) + _NORM_EPS)[:, None]
        beta = tl.sigmoid(tl.load(beta_ptr + token * beta_stride + head, mask=is_token, other=0.0).to(tl.float32))
        beta = tl.where(is_token, beta, 0.0)
        step = tl.load(step_ptr + token * step_stride + head, mask=is_token, other=0.0).to(tl.float32)
        decay = tl.where(is_token, _decay(step, log_rate, step_bias), 0.0)
        total = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        # Above the diagonal the difference may be too large for exp.
        is_past = n[:, None] >= n[None, :]
        between = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)
        overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
        lower = tl.where(n[:, None] > n[None, :], beta[:, None] * overlap, 0.0)
        inverse = _unit_lower_inverse(lower, LEVELS, PRECISION)
        passed = tl.exp(total)[:, None]
        unread = beta[:, None] * (v - tl.dot(k * passed, state, input_precision=PRECISION))
        written = tl.dot(inverse, unread, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        out = tl.dot(q * passed, state, input_precision=PRECISION)
        out += tl.dot(scores, written, input_precision=PRECISION)
        out_ptrs = out_ptr + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + j[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=value_mask)
        left = k * tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(left), written, input_precision=PRECISION)
        first += count
        if (first == end) | (offset + count == BLOCK_SIZE):
            target = tl.load(places_ptr + first - 1) // BLOCK_SIZE
            tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))


def delta_rule(qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: DeltaHeads) -> Tensor:
    """See `nvcli.kernels.delta_net.delta_rule`."""
    assert qkv.stride(1) == gates.beta.stride(1) == gates.step.stride(1) == 1
    assert pool[0].is_contiguous()
    num_rows, num_single = len(rows.slots), rows.num_single_rows
    shape = (len(qkv), heads.num_value_heads, heads.value_dim)
    # Tokens that belong to no row stay zeros.
    make = torch.empty if num_rows == num_single else torch.zeros
    out = make(shape, dtype=qkv.dtype, device=qkv.device)

    def arguments(first_row: int) -> tuple[Tensor | int | float, ...]:
        strides = (qkv.stride(0), gates.beta.stride(0), gates.step.stride(0), pool.stride(0))
        return *gates, pool, out, *row_arguments(rows), first_row, *strides, heads.key_dim**-0.5

    sizes = {
        "BLOCK_SIZE": rows.block_size,
        "KEY_HEADS": heads.num_key_heads,
        "VALUE_HEADS": heads.num_value_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
    }
    if num_single:
        tile = min(_STEP_TILE, next_power_of_2(heads.value_dim))
        _step_kernel[num_single, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
            qkv,
            *arguments(0),
            **sizes,
            KEY_TILE=next_power_of_2(heads.key_dim),
            VALUE_TILE=tile,
            num_warps=_STEP_WARPS,
        )
    if num_rows > num_single:
        # A product of matrices has 16 rows and columns at least.
        tile = min(_CHUNK_TILE, max(16, next_power_of_2(heads.value_dim)))
        _chunk_kernel[num_rows - num_single, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
            qkv,
            *arguments(num_single),
            **sizes,
            KEY_TILE=max(16, next_power_of_2(heads.key_dim)),
            VALUE_TILE=tile,
            LEVELS=_CHUNK_LEVELS,
            PRECISION="tf32x3" if qkv.dtype == torch.float32 else "tf32",
            num_warps=_CHUNK_WARPS,
            num_stages=1,
        )
    return out
