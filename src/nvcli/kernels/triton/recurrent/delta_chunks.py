"""The gated delta rule for chunks of 64 tokens in Triton, in two kernels. The first has a program for each chunk and
solves the chunk's triangular system, which does not depend on states. The second is the walk through the chunks that
all rules share (`chunk_walk.py`).

With queries Q, keys K, values V and state S, decayed as each token sees them, a chunk's tokens write W = A (V - K S),
where A is the inverse of a unit lower triangular matrix times β, and they read Q S + P W. The first kernel computes A
and P. The split is that of Yang et al. (https://arxiv.org/abs/2406.06484, section 3), who keep A K and A V.

The inverse is built from blocks: that of [[A, 0], [C, B]] is [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]. From blocks of 1 to half a
chunk, each size takes two products for all blocks at once, and no intermediate result grows, unlike in the series of
powers of a triangular matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.chunk_walk import (
    CHUNK_TOKENS,
    ChunkParts,
    find_chunk,
    load_queries_keys,
    num_chunk_programs,
    walk_chunks,
)
from nvcli.kernels.triton.recurrent.gates import read_gates
from nvcli.kernels.triton.recurrent.state_rows import RowTensors

NORM_EPS = tl.constexpr(1e-6)
_SOLVE_WARPS, _SOLVE_REGISTERS = 4, 168
"""The register limit makes room for three programs on a multiprocessor. Both kernels together take an H200 289 µs for
8,192 tokens of 14 rows, with 32 heads of 128; 309 without a limit."""


@triton.jit
def inverse_lengths(x):
    """Return what rows have to be multiplied by to have length 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)


@triton.jit
def on_diagonal(blocks, SIZE: tl.constexpr):
    """Return the matrix [SIZE, SIZE] with these blocks [NUM, BLOCK, BLOCK] on its diagonal, and zeros elsewhere."""
    n = tl.arange(0, blocks.shape[0])
    own = (n[:, None] == n[None, :])[:, None, :, None]
    return tl.where(own, blocks[:, :, None, :], 0.0).reshape(SIZE, SIZE)


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
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹ for a matrix of 64 rows, of which only the part below the diagonal is used."""
    tl.static_assert(SIZE == 64)
    small = _blocks_of_16(lower, SIZE)
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    # Blocks of size 1 are their own inverses, so the first size needs no product.
    blocks = tl.where(r == c, 1.0, tl.where(((r ^ c) == 1) & (r > c), -small, 0.0))
    for level in tl.static_range(1, 4):
        blocks = _join(blocks, small, r, c, level, PRECISION)
    inverse = on_diagonal(blocks, SIZE)
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
    scales_ptr,  # [4, VALUE_HEADS, T] float32, written, see `ChunkParts`
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
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """Program (chunk, value head)."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    first, count = find_chunk(tl.program_id(0), rows, first_row, num_rows, num_halvings, BLOCK_SIZE, CHUNK_TOKENS)
    if count > 0:
        n = tl.arange(0, CHUNK_TOKENS)
        is_token = n < count
        token = (first + n).to(tl.int64)
        q, k = load_queries_keys(qkv_ptr, qkv_stride, token, is_token, key_head, HEADS)
        q_scale = inverse_lengths(q) * scale
        overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        k_scale = tl.rsqrt(tl.sum(tl.where(n[:, None] == n[None, :], overlap, 0.0), 1) + NORM_EPS)
        similarity = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        beta, decay = read_gates(gates, token, head, is_token, beta_stride, step_stride, "delta", HEADS.beta_scale)
        decay = tl.where(is_token, decay, 0.0)
        total = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        # Above the diagonal the difference may be too large for exp.
        between = tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -float("inf"))
        between = tl.exp(between) * k_scale[None, :]
        square = (token[:, None] * VALUE_HEADS + head) * CHUNK_TOKENS + n[None, :]
        scores = similarity * between * q_scale[:, None]
        tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty), mask=is_token[:, None])
        lower = overlap * between * (beta * k_scale)[:, None]
        solved = unit_lower_inverse(lower, CHUNK_TOKENS, INVERSE_PRECISION) * beta[None, :]
        tl.store(solved_ptr + square, solved.to(solved_ptr.dtype.element_ty), mask=is_token[:, None])
        passed = tl.exp(total)
        scale_ptrs = scales_ptr + head * num_tokens + token
        stride = VALUE_HEADS * num_tokens
        tl.store(scale_ptrs, q_scale * passed, mask=is_token)
        tl.store(scale_ptrs + stride, k_scale * tl.exp(whole - total), mask=is_token)
        tl.store(scale_ptrs + 2 * stride, passed, mask=is_token)
        tl.store(scale_ptrs + 3 * stride, k_scale * passed, mask=is_token)


def precisions(qkv: Tensor, heads: RecurrentHeads) -> tuple[str, str]:
    """Return the precision of products in float32, and that of the inverse."""
    is_half = qkv.element_size() == 2
    precision = "tf32" if is_half else "tf32x3"
    return precision, "float16" if is_half and heads.beta_scale <= 1.0 else precision


def compute_chunks(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.delta_net.delta_rule` does, with zeros for
    tokens after the last row."""
    num_tokens, num_rows, first_row = len(qkv), len(rows.slots), rows.num_decode_rows
    solved, scores = torch.empty(2, num_tokens, heads.num_value_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    scales = torch.empty(4, heads.num_value_heads, num_tokens, dtype=torch.float32, device=qkv.device)
    precision, inverse_precision = precisions(qkv, heads)
    _solve_kernel[num_chunk_programs(num_tokens, rows), heads.num_value_heads](
        qkv,
        gates,
        solved,
        scores,
        scales,
        RowTensors.of(rows),
        first_row,
        num_rows,
        (num_rows - first_row).bit_length(),
        num_tokens,
        qkv.stride(0),
        gates.beta.stride(0),
        gates.step.stride(0),
        heads.key_dim**-0.5,
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        PRECISION=precision,
        INVERSE_PRECISION=inverse_precision,
        num_warps=_SOLVE_WARPS,
        num_stages=1,
        maxnreg=_SOLVE_REGISTERS if qkv.element_size() == 2 else None,
    )
    walk_chunks(qkv, ChunkParts(solved, scores, scales, None), pool, rows, heads, out)
