"""The selective scan for chunks of 64 tokens in Triton, in two kernels. The first has a program for each chunk and some
of the heads that share keys. It computes Q Kᵀ once, and from it each head's scores P: Q Kᵀ times the decays between
tokens and their step sizes (Dao and Gu, https://arxiv.org/abs/2405.21060, section 6). The second kernel is the walk
through the chunks that all rules share (`chunk_walk.py`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.kernels.recurrent_types import RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.chunk_walk import (
    CHUNK_TOKENS,
    ChunkParts,
    find_chunk,
    load_queries_keys,
    num_chunk_programs,
    walk_chunks,
)
from nvcli.kernels.triton.recurrent.gates import LOG2_E, read_gates
from nvcli.kernels.triton.recurrent.state_rows import RowTensors

_HEADS, _WARPS = 8, 8
"""The most heads of a program, and its warps. Measured with the walk on an H200, for 8,204 tokens of 14 rows and 64
heads: 175 µs; 183 with 4 warps, 177 with 4 heads, 182 with 16 heads."""


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings", "num_tokens"])
def _scores_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS], rows qkv_stride apart
    gates,  # `ScanGates`, rows step_stride apart
    scores_ptr,  # [T, VALUE_HEADS, CHUNK], written: P
    scales_ptr,  # [2, VALUE_HEADS, T] float32, written, see `ChunkParts`
    steps_ptr,  # [2, VALUE_HEADS, T] float32, written: step sizes, and logarithms to base 2 of scales_ptr[0]
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_halvings,
    num_tokens,
    qkv_stride,
    step_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    HEADS_EACH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (chunk, HEADS_EACH value heads of one key head)."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    first_head = tl.program_id(1) * HEADS_EACH
    key_head = first_head // (VALUE_HEADS // KEY_HEADS)
    first, count = find_chunk(tl.program_id(0), rows, first_row, num_rows, num_halvings, BLOCK_SIZE, CHUNK_TOKENS)
    if count > 0:
        n = tl.arange(0, CHUNK_TOKENS)
        is_token = n < count
        token = (first + n).to(tl.int64)
        q, k = load_queries_keys(qkv_ptr, qkv_stride, token, is_token, key_head, HEADS)
        similarity = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        heads = first_head + tl.arange(0, HEADS_EACH)
        are_tokens = tl.broadcast_to(is_token[:, None], CHUNK_TOKENS, HEADS_EACH)
        step, decay = read_gates(gates, token[:, None], heads[None, :], are_tokens, step_stride, step_stride, "scan")
        decay = tl.where(are_tokens, decay, 0.0)
        total = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        stride = VALUE_HEADS * num_tokens
        places = heads[None, :] * num_tokens + token[:, None]
        tl.store(scales_ptr + places, tl.exp(total), mask=are_tokens)
        tl.store(scales_ptr + stride + places, step * tl.exp(whole[None, :] - total), mask=are_tokens)
        # Each head's scores take these numbers in other threads.
        tl.store(steps_ptr + places, step, mask=are_tokens)
        tl.store(steps_ptr + stride + places, total * LOG2_E, mask=are_tokens)
        tl.debug_barrier()
        is_before = (n[:, None] >= n[None, :]) & is_token[:, None]
        of_square = n[:, None] * (VALUE_HEADS * CHUNK_TOKENS) + n[None, :]
        for head in range(first_head, first_head + HEADS_EACH):
            head_ptr = steps_ptr + head * num_tokens + token
            steps = tl.load(head_ptr, mask=is_token, other=0.0)
            decays = tl.load(head_ptr + stride, mask=is_token, other=0.0)
            # Above the diagonal the difference may be too large for exp.
            between = tl.where(is_before, decays[:, None] - decays[None, :], -float("inf"))
            scores = similarity * tl.exp2(between) * steps[None, :]
            score_ptrs = scores_ptr + (first.to(tl.int64) * VALUE_HEADS + head) * CHUNK_TOKENS + of_square
            tl.store(score_ptrs, scores.to(scores_ptr.dtype.element_ty), mask=is_token[:, None])


def compute_chunks(
    qkv: Tensor, gates: ScanGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.recurrence.compute_rows` does, with zeros
    for tokens after the last row."""
    assert qkv.stride(1) == gates.step.stride(1) == 1
    num_tokens, num_rows, first_row = len(qkv), len(rows.slots), rows.num_decode_rows
    num_heads = heads.num_value_heads
    scores = torch.empty(num_tokens, num_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    scales, steps = torch.empty(2, 2, num_heads, num_tokens, dtype=torch.float32, device=qkv.device)
    heads_each = math.gcd(_HEADS, num_heads // heads.num_key_heads)
    _scores_kernel[num_chunk_programs(num_tokens, rows), num_heads // heads_each](
        qkv,
        gates,
        scores,
        scales,
        steps,
        RowTensors.of(rows),
        first_row,
        num_rows,
        (num_rows - first_row).bit_length(),
        num_tokens,
        qkv.stride(0),
        gates.step.stride(0),
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        HEADS_EACH=heads_each,
        PRECISION="tf32" if qkv.element_size() == 2 else "tf32x3",
        num_warps=_WARPS,
        num_stages=1,
    )
    walk_chunks(qkv, ChunkParts(None, scores, scales, gates.skip), pool, rows, heads, out)
