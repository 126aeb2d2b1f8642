"""The gated delta rule for chunks of 64 tokens in Triton, in two kernels. The first has a program for each chunk and
solves the chunk's triangular system, which does not depend on states. The second has a program for some columns of one
head's state, and goes through a row's chunks one after another.

With queries Q, keys K, values V and state S, decayed as each token sees them, a chunk's tokens write W = A (V - K S),
where A is the inverse of a unit lower triangular matrix times β, and they read Q S + P W. The first kernel computes A
and P. The second keeps Sᵀ and multiplies transposed, so that each product is the first factor of the next one and stays
in registers. The split is that of Yang et al. (https://arxiv.org/abs/2406.06484, section 3), who keep A K and A V.

The inverse is built from blocks: that of [[A, 0], [C, B]] is [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]. From blocks of 1 to half a
chunk, each size takes two products for all blocks at once, and no intermediate result grows, unlike in the series of
powers of a triangular matrix.

Chunks are counted from the first token of each block, so that a request has the same chunks however steps cut it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.multiprocessors import shared_memory_bytes
from nvcli.kernels.triton.recurrent.gates import read_gates
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, chunk_of, chunk_tokens, row_of, row_span
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

NORM_EPS = tl.constexpr(1e-6)
_CHUNK = 64
_MORE_CHUNKS = tl.constexpr(3)
"""Maximum number of chunks of a row beyond those that its tokens fill: it may begin and end inside a chunk, and cross
the end of a block whose size is not a multiple of a chunk."""
_SOLVE_WARPS, _SOLVE_REGISTERS = 4, 168
"""The register limit makes room for three programs on a multiprocessor. Both kernels together take an H200 289 µs for
8,192 tokens of 14 rows, with 32 heads of 128; 309 without a limit."""
_VALUE_TILE, _PASS_WARPS, _PASS_STAGES = 64, 4, 2
"""Measured in the same way: 289 µs; 304 with tiles of 128 and 8 warps, 345 with one stage."""


@triton.jit
def _find_chunk(index, rows, first_row, num_rows, num_halvings, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the row and the chunk of a program. Each row from `first_row` on has as many programs as it may have
    chunks; some of them get a chunk after the row's last one."""
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK - 1) // CHUNK
    origin = tl.load(rows.starts + first_row)
    low = first_row
    high = num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        first = (tl.load(rows.starts + middle) - origin) * CHUNKS // BLOCK_SIZE + _MORE_CHUNKS * (middle - first_row)
        low = tl.where(first <= index, middle, low)
        high = tl.where(first <= index, high, middle)
    start, _, before = row_span(low, rows)
    index -= (start - origin) * CHUNKS // BLOCK_SIZE + _MORE_CHUNKS * (low - first_row)
    return low, chunk_of(before, BLOCK_SIZE, CHUNK) + index


@triton.jit
def _blocks_of_16(matrix, SIZE: tl.constexpr):
    """Return the blocks on the diagonal: [SIZE, SIZE] → [SIZE / 16, 16, 16]."""
    NUM: tl.constexpr = SIZE // 16
    n = tl.arange(0, NUM)
    own = (n[:, None] == n[None, :])[:, None, :, None]
    return tl.sum(tl.where(own, matrix.reshape(NUM, 16, NUM, 16), 0.0), 2)


@triton.jit
def _join(inverse, lower, i, j, level, PRECISION: tl.constexpr):
    """Compute the inverses of the blocks of size 2^(level + 1) on a matrix's diagonal from those of size 2^level."""
    between = tl.where((((i ^ j) >> level) == 1) & (i > j), lower, 0.0)
    # The entries of an inverse are at most 1, so float16 holds them as well as tf32 does.
    HALF: tl.constexpr = PRECISION == "float16"
    inner = inverse.to(tl.float16) if HALF else inverse
    between = between.to(inner.dtype)
    product = tl.dot(inner, between, input_precision=None if HALF else PRECISION).to(inner.dtype)
    return inverse - tl.dot(product, inner, input_precision=None if HALF else PRECISION)


@triton.jit
def _unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹ for a matrix of 64 rows, of which only the part below the diagonal is used."""
    tl.static_assert(SIZE == 64)
    small = _blocks_of_16(lower, SIZE)
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    # Blocks of size 1 are their own inverses, so the first size needs no product.
    blocks = tl.where(r == c, 1.0, tl.where(((r ^ c) == 1) & (r > c), -small, 0.0))
    for level in tl.static_range(1, 4):
        blocks = _join(blocks, small, r, c, level, PRECISION)
    n = tl.arange(0, SIZE // 16)
    own = (n[:, None] == n[None, :])[:, None, :, None]
    inverse = tl.where(own, blocks[:, :, None, :], 0.0).reshape(SIZE, SIZE)
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(4, 6):
        inverse = _join(inverse, lower, i, j, level, PRECISION)
    return inverse


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings", "num_tokens"])
def _solve_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS], rows qkv_stride apart
    gates,  # `DeltaGates`, rows beta_stride and step_stride apart
    solved_ptr,  # [T, VALUE_HEADS, CHUNK], written: A
    scores_ptr,  # [T, VALUE_HEADS, CHUNK], written: P
    scales_ptr,  # [4, VALUE_HEADS, T] float32, written: for queries that read the state before the chunk, for keys that
    # read it, for keys that write the state after the chunk, and the decay from the chunk's start to each token
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_halvings,
    num_tokens,
    qkv_stride,
    beta_stride,
    step_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """Program (chunk, value head)."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    row, chunk = _find_chunk(tl.program_id(0), rows, first_row, num_rows, num_halvings, BLOCK_SIZE, CHUNK)
    start, end, before = row_span(row, rows)
    first, count = chunk_tokens(chunk, start, end, before, BLOCK_SIZE, CHUNK)
    if count > 0:
        i = tl.arange(0, KEY_TILE)
        n = tl.arange(0, CHUNK)
        is_token = n < count
        token = (first + n).to(tl.int64)
        q_ptrs = qkv_ptr + token[:, None] * qkv_stride + key_head * KEY_DIM + i[None, :]
        mask = is_token[:, None] & (i < KEY_DIM)[None, :]
        # After the chunk everything is zero: such tokens write nothing and decay nothing.
        q = tl.load(q_ptrs, mask=mask, other=0.0)
        k = tl.load(q_ptrs + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
        q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + NORM_EPS) * scale
        overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        k_scale = tl.rsqrt(tl.sum(tl.where(n[:, None] == n[None, :], overlap, 0.0), 1) + NORM_EPS)
        similarity = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        beta, decay = read_gates(gates, token, head, is_token, beta_stride, step_stride, "delta")
        decay = tl.where(is_token, decay, 0.0)
        total = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        # Above the diagonal the difference may be too large for exp.
        between = tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -float("inf"))
        between = tl.exp(between) * k_scale[None, :]
        square = (token[:, None] * VALUE_HEADS + head) * CHUNK + n[None, :]
        scores = similarity * between * q_scale[:, None]
        tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty), mask=is_token[:, None])
        lower = overlap * between * (beta * k_scale)[:, None]
        solved = _unit_lower_inverse(lower, CHUNK, INVERSE_PRECISION) * beta[None, :]
        tl.store(solved_ptr + square, solved.to(solved_ptr.dtype.element_ty), mask=is_token[:, None])
        passed = tl.exp(total)
        scale_ptrs = scales_ptr + head * num_tokens + token
        stride = VALUE_HEADS * num_tokens
        tl.store(scale_ptrs, q_scale * passed, mask=is_token)
        tl.store(scale_ptrs + stride, k_scale * passed, mask=is_token)
        tl.store(scale_ptrs + 2 * stride, k_scale * tl.exp(whole - total), mask=is_token)
        tl.store(scale_ptrs + 3 * stride, passed, mask=is_token)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _pass_kernel(
    qkv_ptr,  # as in _solve_kernel
    solved_ptr,
    scores_ptr,
    scales_ptr,
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    rows,
    first_row,
    num_rows,
    num_tokens,
    qkv_stride,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (row - first_row, value head, tile of the state's columns)."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK - 1) // CHUNK
    row = tl.program_id(0) + first_row
    head = tl.program_id(1)
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, KEY_TILE)
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    n = tl.arange(0, CHUNK)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.trans(tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0))
    first_chunk = chunk_of(before, BLOCK_SIZE, CHUNK)
    num_chunks = chunk_of(before + end - start - 1, BLOCK_SIZE, CHUNK) - first_chunk + 1
    num_chunks = tl.where(end > start, num_chunks, 0)
    dtype = qkv_ptr.dtype.element_ty
    stride = VALUE_HEADS * num_tokens
    scales_ptr += head * num_tokens
    for number in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        chunk = first_chunk + number
        first, count = chunk_tokens(chunk, start, end, before, BLOCK_SIZE, CHUNK)
        is_token = n < count
        token = (first + n).to(tl.int64)
        row_ptrs = qkv_ptr + token[:, None] * qkv_stride
        key_mask = is_token[:, None] & in_key[None, :]
        value_mask = is_token[:, None] & in_value[None, :]
        k = tl.load(row_ptrs + (KEY_HEADS + key_head) * KEY_DIM + i[None, :], mask=key_mask, other=0.0)
        q = tl.load(row_ptrs + key_head * KEY_DIM + i[None, :], mask=key_mask, other=0.0)
        value_column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
        v = tl.load(row_ptrs + value_column[None, :], mask=value_mask, other=0.0)
        square = (token[:, None] * VALUE_HEADS + head) * CHUNK + n[None, :]
        solved = tl.load(solved_ptr + square, mask=is_token[:, None], other=0.0)
        scores = tl.load(scores_ptr + square, mask=is_token[:, None], other=0.0)
        q_passed = tl.load(scales_ptr + token, mask=is_token, other=0.0)
        k_passed = tl.load(scales_ptr + stride + token, mask=is_token, other=0.0)
        k_left = tl.load(scales_ptr + 2 * stride + token, mask=is_token, other=0.0)
        whole = tl.load(scales_ptr + 3 * stride + first + count - 1)
        rounded = state.to(dtype)
        read = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
        out = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * q_passed[None, :]
        unread = tl.trans(v).to(tl.float32) - read * k_passed[None, :]
        written = tl.dot(unread.to(dtype), tl.trans(solved), input_precision=PRECISION)
        out = tl.dot(written.to(dtype), tl.trans(scores), out, input_precision=PRECISION)
        state = tl.dot((written * k_left[None, :]).to(dtype), k, state * whole, input_precision=PRECISION)
        out_ptrs = out_ptr + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + j[None, :]
        tl.store(out_ptrs, tl.trans(out).to(out_ptr.dtype.element_ty), mask=value_mask)
        if (number == num_chunks - 1) | ((chunk + 1) % CHUNKS == 0):
            target = tl.load(rows.places + first + count - 1) // BLOCK_SIZE
            tl.store(pool_ptr + target * pool_stride + places, tl.trans(state), mask=inside & (target > 0))
    if row == num_rows - 1:
        # Tokens after the last row.
        first = end
        while first < num_tokens:
            token = first + n
            out_ptrs = out_ptr + (token[:, None].to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + j[None, :]
            nothing = tl.zeros([CHUNK, VALUE_TILE], out_ptr.dtype.element_ty)
            tl.store(out_ptrs, nothing, mask=(token < num_tokens)[:, None] & in_value[None, :])
            first += CHUNK


def compute_chunks(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.delta_net.delta_rule` does, with zeros for
    tokens after the last row."""
    num_tokens, num_rows, first_row = len(qkv), len(rows.slots), rows.num_decode_rows
    tensors = RowTensors.of(rows)
    solved, scores = torch.empty(2, num_tokens, heads.num_value_heads, _CHUNK, dtype=qkv.dtype, device=qkv.device)
    scales = torch.empty(4, heads.num_value_heads, num_tokens, dtype=torch.float32, device=qkv.device)
    is_half = qkv.element_size() == 2
    precision = "tf32" if is_half else "tf32x3"
    # Matrix products need at least 16 rows and columns.
    key_tile = max(16, next_power_of_2(heads.key_dim))
    sizes = {
        "BLOCK_SIZE": rows.block_size,
        "HEADS": heads,
        "KEY_TILE": key_tile,
        "CHUNK": _CHUNK,
        "PRECISION": precision,
    }
    num_chunks = (num_tokens - first_row) * ceil_div(rows.block_size, _CHUNK) // rows.block_size
    num_chunks += _MORE_CHUNKS.value * (num_rows - first_row)
    _solve_kernel[num_chunks, heads.num_value_heads](
        qkv,
        gates,
        solved,
        scores,
        scales,
        tensors,
        first_row,
        num_rows,
        (num_rows - first_row).bit_length(),
        num_tokens,
        qkv.stride(0),
        gates.beta.stride(0),
        gates.step.stride(0),
        heads.key_dim**-0.5,
        **sizes,
        INVERSE_PRECISION="float16" if is_half else precision,
        num_warps=_SOLVE_WARPS,
        num_stages=1,
        maxnreg=_SOLVE_REGISTERS if is_half else None,
    )
    tile = min(_VALUE_TILE, max(16, next_power_of_2(heads.value_dim)))
    num_stages = _PASS_STAGES if _holds_two_chunks(qkv, key_tile) else 1
    _pass_kernel[num_rows - first_row, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
        qkv,
        solved,
        scores,
        scales,
        pool,
        out,
        tensors,
        first_row,
        num_rows,
        num_tokens,
        qkv.stride(0),
        pool.stride(0),
        **sizes,
        VALUE_TILE=tile,
        NUM_STAGES=num_stages,
        num_warps=_PASS_WARPS,
        num_stages=num_stages,
    )


def _holds_two_chunks(qkv: Tensor, key_tile: int) -> bool:
    """Whether shared memory holds the current chunk and the next one, 48 KiB each with keys of 128."""
    if not qkv.is_cuda or qkv.element_size() > 2 or key_tile > 128:
        return False
    return shared_memory_bytes(qkv.device) >= 128 << 10
