"""The selective scan for chunks of 64 tokens in Triton. A program has some columns of one head's state, and goes
through a row's chunks one after another.

With queries Q, keys K, values V and state S, a chunk's tokens read Q S, decayed to each of them, and (Q Kᵀ) V, with
decays and step sizes as weights; then the chunk's own Kᵀ V is added to the decayed state (Dao and Gu,
https://arxiv.org/abs/2405.21060, section 6). Each program computes Q Kᵀ anew, which takes less time than to store it
for the heads of a group.

Chunks are counted from the first token of each block, so that a request has the same chunks however steps cut it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_types import RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.gates import read_gates
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, chunk_of, chunk_tokens, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_CHUNK = 64
_STATE, _WARPS, _STAGES = 128 * 32, 4, 2
"""The most numbers of a state that a program holds, and its launch. Measured on an H200 with 64 heads of 64 and keys of
128, for 8,204 tokens of 14 rows and 8,192 tokens of one row: 310 and 450 µs; 334 and 511 with one stage, 427 and 1,250
with twice the numbers, 398 and 675 with twice the numbers and 8 warps, 525 and 447 with chunks of 128 and 8 warps."""


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _scan_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS], rows qkv_stride apart
    gates,  # `ScanGates`, rows step_stride apart
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_tokens,
    qkv_stride,
    step_stride,
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
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    skip = tl.load(gates.skip + head).to(tl.float32)
    first_chunk = chunk_of(before, BLOCK_SIZE, CHUNK)
    num_chunks = chunk_of(before + end - start - 1, BLOCK_SIZE, CHUNK) - first_chunk + 1
    num_chunks = tl.where(end > start, num_chunks, 0)
    dtype = qkv_ptr.dtype.element_ty
    for number in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        chunk = first_chunk + number
        first, count = chunk_tokens(chunk, start, end, before, BLOCK_SIZE, CHUNK)
        is_token = n < count
        token = (first + n).to(tl.int64)
        row_ptrs = qkv_ptr + token[:, None] * qkv_stride
        key_mask = is_token[:, None] & in_key[None, :]
        value_mask = is_token[:, None] & in_value[None, :]
        q = tl.load(row_ptrs + key_head * KEY_DIM + i[None, :], mask=key_mask, other=0.0)
        k = tl.load(row_ptrs + (KEY_HEADS + key_head) * KEY_DIM + i[None, :], mask=key_mask, other=0.0)
        value_column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
        v = tl.load(row_ptrs + value_column[None, :], mask=value_mask, other=0.0)
        factor, decay = read_gates(gates, token, head, is_token, step_stride, step_stride, "scan")
        decay = tl.where(is_token, decay, 0.0)
        total = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        # Above the diagonal the difference may be too large for exp.
        between = tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -float("inf"))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(between) * factor[None, :]
        out = tl.dot(q, state.to(dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        out = tl.dot(scores.to(dtype), v, out, input_precision=PRECISION)
        out += skip * v.to(tl.float32)
        out_ptrs = out_ptr + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + j[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=value_mask)
        written = v.to(tl.float32) * (factor * tl.exp(whole - total))[:, None]
        state = tl.dot(tl.trans(k), written.to(dtype), state * tl.exp(whole), input_precision=PRECISION)
        if (number == num_chunks - 1) | ((chunk + 1) % CHUNKS == 0):
            target = tl.load(rows.places + first + count - 1) // BLOCK_SIZE
            tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))
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
    qkv: Tensor, gates: ScanGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.recurrence.compute_rows` does, with zeros
    for tokens after the last row."""
    assert qkv.stride(1) == gates.step.stride(1) == 1
    num_tokens, num_rows, first_row = len(qkv), len(rows.slots), rows.num_decode_rows
    is_half = qkv.element_size() == 2
    # Matrix products need at least 16 rows and columns.
    key_tile = max(16, next_power_of_2(heads.key_dim))
    tile = min(_STATE // key_tile, max(16, next_power_of_2(heads.value_dim)))
    num_stages = _STAGES if is_half else 1
    _scan_kernel[num_rows - first_row, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
        qkv,
        gates,
        pool,
        out,
        RowTensors.of(rows),
        first_row,
        num_rows,
        num_tokens,
        qkv.stride(0),
        gates.step.stride(0),
        pool.stride(0),
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        KEY_TILE=key_tile,
        VALUE_TILE=tile,
        CHUNK=_CHUNK,
        PRECISION="tf32" if is_half else "tf32x3",
        NUM_STAGES=num_stages,
        num_warps=_WARPS,
        num_stages=num_stages,
    )
