"""The gated delta rule with a decay for each row of a state (Kimi Delta Attention, https://arxiv.org/abs/2510.26692)
for chunks of 64 tokens in Triton. As in `delta_chunks.py`, a kernel computes A and P of each chunk, and the walk
through the chunks does the rest (`chunk_walk.py`).

Token i meets the key of token j < i with each number decayed by exp(G_i - G_j), where G are sums of logarithms. That is
a product of two vectors around any token m from j to i - 1: exp(G_i - G_m) times exp(G_m - G_j). Neither exceeds 1,
however fast a state decays, while exp(-G_j) alone might be too large for a float. So the pairs of a chunk are computed
in halves: its second half with its first one around the middle, then both halves' halves likewise, down to neighbours.
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
    key_tile,
    load_queries_keys,
    num_chunk_programs,
    walk_chunks,
)
from nvcli.kernels.triton.recurrent.delta_chunks import inverse_lengths, on_diagonal, precisions, unit_lower_inverse
from nvcli.kernels.triton.recurrent.gates import read_beta, read_decays
from nvcli.kernels.triton.recurrent.state_rows import RowTensors

_CHANNELS, _WARPS = tl.constexpr(16), 4
"""The channels of queries and keys that a program holds at a time, and its warps. 8,192 tokens of 32 heads of 128 take
an H200 891 µs; with 32 channels 1,290, and with 8 warps besides 1,510."""


@triton.jit
def _at_middles(x, SIZE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Return, for each row of x [SIZE, WIDTH], the last row of the first half of its stretch of 2 HALF rows."""
    NUM: tl.constexpr = SIZE // (2 * HALF)
    is_middle = (tl.arange(0, 2 * HALF) == HALF - 1)[None, :, None]
    middles = tl.sum(tl.where(is_middle, x.reshape(NUM, 2 * HALF, WIDTH), 0.0), 1)
    return tl.broadcast_to(middles[:, None, :], NUM, 2 * HALF, WIDTH).reshape(SIZE, WIDTH)


@triton.jit
def _parted(q, k, total, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """Return queries and keys of the second halves of stretches of 2 × 2^LEVEL tokens, and keys of the first halves,
    each decayed between itself and the middle, with zeros for other tokens. q, k, total: [tokens, channels]."""
    # Vectors have length 1, so their numbers are at most 1, and float16 holds them as well as tf32 does.
    dtype: tl.constexpr = tl.float16 if PRECISION == "float16" else tl.float32
    # Neither the decay from the middle on nor the one up to it exceeds 1.
    passed = tl.exp(-tl.abs(total - _at_middles(total, k.shape[0], k.shape[1], 1 << LEVEL)))
    is_second = ((tl.arange(0, k.shape[0]) >> LEVEL) & 1)[:, None] == 1
    queries = tl.where(is_second, q * passed, 0.0).to(dtype)
    keys = (k * passed).to(dtype)
    return queries, tl.where(is_second, keys, 0.0), tl.where(is_second, 0.0, keys)


@triton.jit
def _product_of_blocks(x, y, PRECISION: tl.constexpr):
    """Multiply each 16 rows of x [SIZE, WIDTH] with the same rows of y: [SIZE / 16, 16, 16]."""
    NUM: tl.constexpr = x.shape[0] // 16
    x, y = x.reshape(NUM, 16, x.shape[1]), y.reshape(NUM, 16, x.shape[1])
    return tl.dot(x, y.permute(0, 2, 1), input_precision=None if PRECISION == "float16" else PRECISION)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings"])
def _solve_channels_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS], rows qkv_stride apart; queries and keys are written, see `ChunkParts`
    gates,  # `DeltaGates`, rows beta_stride and step_stride apart
    solved_ptr,  # [T, VALUE_HEADS, CHUNK], written: A
    scores_ptr,  # [T, VALUE_HEADS, CHUNK], written: P
    left_keys_ptr,  # [T, VALUE_HEADS, KEY_DIM], written, see `ChunkParts`
    wholes_ptr,  # [programs, VALUE_HEADS, KEY_DIM] float32, written, see `ChunkParts`
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_halvings,
    qkv_stride,
    beta_stride,
    step_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    PRECISION: tl.constexpr,  # "float16", or the precision of products in float32
    INVERSE_PRECISION: tl.constexpr,
):
    """Program (chunk, value head)."""
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    head = tl.program_id(1)
    first, count = find_chunk(tl.program_id(0), rows, first_row, num_rows, num_halvings, BLOCK_SIZE, CHUNK_TOKENS)
    if count > 0:
        DOT_PRECISION: tl.constexpr = None if PRECISION == "float16" else PRECISION
        n = tl.arange(0, CHUNK_TOKENS)
        is_token = n < count
        token = (first + n).to(tl.int64)
        whole_q, whole_k = load_queries_keys(qkv_ptr, qkv_stride, token, is_token, head, HEADS)
        q_scale, k_scale = inverse_lengths(whole_q), inverse_lengths(whole_k)
        tl.debug_barrier()  # all threads have loaded what another one overwrites
        tl.static_assert(CHUNK_TOKENS == 64)
        r = tl.arange(0, 16)
        overlap = tl.zeros([CHUNK_TOKENS, CHUNK_TOKENS], tl.float32)
        similarity = tl.zeros([CHUNK_TOKENS, CHUNK_TOKENS], tl.float32)
        near_overlap = tl.zeros([CHUNK_TOKENS // 16, 16, 16], tl.float32)
        near_similarity = tl.zeros([CHUNK_TOKENS // 16, 16, 16], tl.float32)
        own_similarity = tl.zeros([CHUNK_TOKENS], tl.float32)
        for first_channel in range(0, key_tile(HEADS), _CHANNELS):
            i = first_channel + tl.arange(0, _CHANNELS)
            in_key = i < KEY_DIM
            mask = is_token[:, None] & in_key[None, :]
            q_ptrs = qkv_ptr + token[:, None] * qkv_stride + head * KEY_DIM + i[None, :]
            k_ptrs = q_ptrs + VALUE_HEADS * KEY_DIM
            q = tl.load(q_ptrs, mask=mask, other=0.0).to(tl.float32) * q_scale[:, None]
            k = tl.load(k_ptrs, mask=mask, other=0.0).to(tl.float32) * k_scale[:, None]
            decay = read_decays(gates, token[:, None], head, i[None, :], mask, step_stride, HEADS)
            total = tl.cumsum(decay, 0)
            own_similarity += tl.sum(q * k, 1)
            for level in tl.static_range(4):
                queries, keys, earlier = _parted(q, k, total, level, PRECISION)
                is_near = (((r[:, None] ^ r[None, :]) >> level) == 1)[None, :, :]
                near_overlap += tl.where(is_near, _product_of_blocks(keys, earlier, PRECISION), 0.0)
                near_similarity += tl.where(is_near, _product_of_blocks(queries, earlier, PRECISION), 0.0)
            for level in tl.static_range(4, 6):
                queries, keys, earlier = _parted(q, k, total, level, PRECISION)
                for stretch in tl.static_range(32 >> level):
                    is_own = ((n >> (level + 1)) == stretch)[:, None]
                    before_it = tl.trans(tl.where(is_own, earlier, 0.0))
                    overlap = tl.dot(tl.where(is_own, keys, 0.0), before_it, overlap, input_precision=DOT_PRECISION)
                    similarity = tl.dot(
                        tl.where(is_own, queries, 0.0), before_it, similarity, input_precision=DOT_PRECISION
                    )
            whole = tl.sum(decay, 0)
            whole_ptrs = wholes_ptr + (tl.program_id(0) * VALUE_HEADS + head) * KEY_DIM + i
            tl.store(whole_ptrs, tl.exp(whole), mask=in_key)
            left_ptrs = left_keys_ptr + (token[:, None] * VALUE_HEADS + head) * KEY_DIM + i[None, :]
            left = k * tl.exp(whole[None, :] - total)
            tl.store(left_ptrs, left.to(left_keys_ptr.dtype.element_ty), mask=mask)
            passed = tl.exp(total)
            tl.debug_barrier()  # as above
            tl.store(q_ptrs, (q * passed * scale).to(qkv_ptr.dtype.element_ty), mask=mask)
            tl.store(k_ptrs, (k * passed).to(qkv_ptr.dtype.element_ty), mask=mask)
        similarity += on_diagonal(near_similarity, CHUNK_TOKENS)
        similarity += tl.where(n[:, None] == n[None, :], own_similarity[:, None], 0.0)
        square = (token[:, None] * VALUE_HEADS + head) * CHUNK_TOKENS + n[None, :]
        tl.store(scores_ptr + square, (similarity * scale).to(scores_ptr.dtype.element_ty), mask=is_token[:, None])
        beta = read_beta(gates, token, head, is_token, beta_stride, HEADS.beta_scale)
        overlap += on_diagonal(near_overlap, CHUNK_TOKENS)
        solved = unit_lower_inverse(overlap * beta[:, None], CHUNK_TOKENS, INVERSE_PRECISION) * beta[None, :]
        tl.store(solved_ptr + square, solved.to(solved_ptr.dtype.element_ty), mask=is_token[:, None])


def compute_chunks(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.delta_net.delta_rule` does, with zeros for
    tokens after the last row. Their queries and keys in `qkv` are overwritten."""
    assert heads.num_key_heads == heads.num_value_heads
    num_tokens, num_rows, first_row = len(qkv), len(rows.slots), rows.num_decode_rows
    num_heads, num_programs = heads.num_value_heads, num_chunk_programs(num_tokens, rows)
    solved, scores = torch.empty(2, num_tokens, num_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    left_keys = torch.empty(num_tokens, num_heads, heads.key_dim, dtype=qkv.dtype, device=qkv.device)
    wholes = torch.empty(num_programs, num_heads, heads.key_dim, dtype=torch.float32, device=qkv.device)
    precision, inverse_precision = precisions(qkv, heads)
    _solve_channels_kernel[num_programs, num_heads](
        qkv,
        gates,
        solved,
        scores,
        left_keys,
        wholes,
        RowTensors.of(rows),
        first_row,
        num_rows,
        (num_rows - first_row).bit_length(),
        qkv.stride(0),
        gates.beta.stride(0),
        gates.step.stride(0),
        heads.key_dim**-0.5,
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        PRECISION="float16" if qkv.element_size() == 2 else precision,
        INVERSE_PRECISION=inverse_precision,
        num_warps=_WARPS,
        num_stages=1,
    )
    walk_chunks(qkv, ChunkParts(solved, scores, None, None, left_keys, wholes), pool, rows, heads, out)
