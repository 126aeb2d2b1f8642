"""The walk through the chunks of rows in Triton, which all rules share. A program has some columns of one head's
state, and goes through a row's chunks one after another; a kernel of the rule before it computes all that does not
depend on states, for all chunks at once (`delta_chunks.py`, `channel_chunks.py`, `scan_chunks.py`).

With queries Q, keys K, values V and state S, decayed as each token sees them, a chunk's tokens write W, which is V by
the selective scan and A (V - K S) by the delta rule, and they read Q S + P W. The walk keeps Sᵀ and multiplies
transposed, so that each product is the first factor of the next one and stays in registers.

Chunks are counted from the first token of each block, so that a request has the same chunks however steps cut it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.kernels.recurrent_types import RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors, shared_memory_bytes
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, chunk_of, chunk_tokens, row_of, row_span
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

CHUNK_TOKENS = tl.constexpr(CHUNK)
_MORE_CHUNKS = tl.constexpr(3)
"""Maximum number of chunks of a row beyond those that its tokens fill: it may begin and end inside a chunk, and cross
the end of a block whose size is not a multiple of a chunk."""
_TILE, _WARPS, _STAGES = 64, 4, 2
"""Measured on an H200 for 8,204 tokens of 14 rows, with the kernel before: delta rule, 32 heads of 128, 283 µs; 279
with tiles of 128 and 8 warps, 366 with tiles of 32, 320 with one stage, 368 with three. Scan, 64 heads of 64 and keys
of 128, 183 µs; 320 with tiles of 32, 229 with one stage, 201 with three."""
_FEW_TILE, _FEW_STAGES = 32, 3
"""Taken where there are fewer programs than multiprocessors. For 8,192 tokens of one row the delta rule takes 400 µs
with tiles of 32, and 473 with the others; the scan takes 265 µs with three stages, and 330 with two."""


class ChunkParts(NamedTuple):
    """Results of a rule for all chunks, computed before their states are known. T tokens, Hv value heads, Dk the size
    of their keys."""

    solved: Tensor | None
    """[T, Hv, CHUNK], A; by the delta rule alone."""
    scores: Tensor
    """[T, Hv, CHUNK], P."""
    scales: Tensor | None
    """[2, Hv, T] float32: for queries that read the state before the chunk, by the scan also the decay from the chunk's
    start to each token, and for keys that write the state after it. By the delta rule [4, Hv, T], with that decay, and
    for keys that read the state."""
    skip: Tensor | None = None
    """[Hv], how much of its own value a token's result gets; by the scan alone."""
    left_keys: Tensor | None = None
    """[T, Hv, Dk], the keys that write the state after the chunk, where each row of a state has its own decay. Queries
    and keys that read the state before it then stand in place of the step's own, and there are no scales."""
    wholes: Tensor | None = None
    """[programs, Hv, Dk] float32, the decays of each row of a state over each chunk (`find_chunk`)."""


@triton.jit
def first_program(start, row, origin, first_row, CHUNKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the program of a row's first chunk, where `start` is the row's first token."""
    return (start - origin) * CHUNKS // BLOCK_SIZE + _MORE_CHUNKS * (row - first_row)


@triton.jit
def find_chunk(index, rows, first_row, num_rows, num_halvings, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first token of a program's chunk, and how many it has. Each row from `first_row` on has as many
    programs as it may have chunks; some of them get a chunk after the row's last one, without tokens."""
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK - 1) // CHUNK
    origin = tl.load(rows.starts + first_row)
    low = first_row
    high = num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        first = first_program(tl.load(rows.starts + middle), middle, origin, first_row, CHUNKS, BLOCK_SIZE)
        low = tl.where(first <= index, middle, low)
        high = tl.where(first <= index, high, middle)
    start, end, before = row_span(low, rows)
    index -= first_program(start, low, origin, first_row, CHUNKS, BLOCK_SIZE)
    chunk = chunk_of(before, BLOCK_SIZE, CHUNK) + index
    return chunk_tokens(chunk, start, end, before, BLOCK_SIZE, CHUNK)


@triton.constexpr_function
def key_tile(heads):
    """Return the tile of a key: matrix products need at least 16 rows and columns."""
    return max(16, triton.next_power_of_2(heads.key_dim))


@triton.jit
def load_queries_keys(qkv_ptr, qkv_stride, token, is_token, key_head, HEADS: tl.constexpr):
    """Load a chunk's queries and keys, [CHUNK, tile of a key] each. Everything after the chunk is zero: such tokens
    write nothing and decay nothing."""
    i = tl.arange(0, key_tile(HEADS))
    q_ptrs = qkv_ptr + token[:, None] * qkv_stride + key_head * HEADS.key_dim + i[None, :]
    mask = is_token[:, None] & (i < HEADS.key_dim)[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    return q, tl.load(q_ptrs + HEADS.num_key_heads * HEADS.key_dim, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _walk_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS], rows qkv_stride apart
    parts,  # `ChunkParts`
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_tokens,
    qkv_stride,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    VALUE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (row - first_row, value head, tile of the state's columns)."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    IS_DELTA: tl.constexpr = HEADS.rule == "delta"
    BY_CHANNEL: tl.constexpr = HEADS.decays_by_channel
    DECAYS: tl.constexpr = 2 if IS_DELTA else 0  # in `scales`
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    row = tl.program_id(0) + first_row
    head = tl.program_id(1)
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, key_tile(HEADS))
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    n = tl.arange(0, CHUNK_TOKENS)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.trans(tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0))
    skip = 0.0 if IS_DELTA else tl.load(parts.skip + head).to(tl.float32)
    first_chunk = chunk_of(before, BLOCK_SIZE, CHUNK_TOKENS)
    num_chunks = chunk_of(before + end - start - 1, BLOCK_SIZE, CHUNK_TOKENS) - first_chunk + 1
    num_chunks = tl.where(end > start, num_chunks, 0)
    dtype = qkv_ptr.dtype.element_ty
    # Places behind those of a chunk's first token: 32 bits wide, and the same for all chunks.
    of_keys = n[:, None] * qkv_stride + i[None, :]
    of_values = n[:, None] * qkv_stride + j[None, :]
    of_square = n[:, None] * (VALUE_HEADS * CHUNK_TOKENS) + n[None, :]
    of_out = n[:, None] * (VALUE_HEADS * VALUE_DIM) + j[None, :]
    stride = VALUE_HEADS * num_tokens
    if BY_CHANNEL:
        of_left = n[:, None] * (VALUE_HEADS * KEY_DIM) + i[None, :]
        program = first_program(start, row, tl.load(rows.starts + first_row), first_row, CHUNKS, BLOCK_SIZE)
    else:
        scales_ptr = parts.scales + head * num_tokens
    for number in tl.range(0, num_chunks, num_stages=NUM_STAGES):
        chunk = first_chunk + number
        first, count = chunk_tokens(chunk, start, end, before, BLOCK_SIZE, CHUNK_TOKENS)
        is_token = n < count
        token_ptr = qkv_ptr + first.to(tl.int64) * qkv_stride
        head_row = first.to(tl.int64) * VALUE_HEADS + head
        key_mask = is_token[:, None] & in_key[None, :]
        value_mask = is_token[:, None] & in_value[None, :]
        # After the chunk everything is zero: such tokens write nothing and decay nothing.
        k = tl.load(token_ptr + (KEY_HEADS + key_head) * KEY_DIM + of_keys, mask=key_mask, other=0.0)
        q = tl.load(token_ptr + key_head * KEY_DIM + of_keys, mask=key_mask, other=0.0)
        v = tl.load(token_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + of_values, mask=value_mask, other=0.0)
        scores = tl.load(parts.scores + head_row * CHUNK_TOKENS + of_square, mask=is_token[:, None], other=0.0)
        if BY_CHANNEL:
            left_k = tl.load(parts.left_keys + head_row * KEY_DIM + of_left, mask=key_mask, other=0.0)
            whole_ptrs = parts.wholes + ((program + number) * VALUE_HEADS + head) * KEY_DIM + i
            whole = tl.load(whole_ptrs, mask=in_key, other=0.0)[None, :]
            q_passed = tl.full([CHUNK_TOKENS], 1.0, tl.float32)
            k_left = q_passed
        else:
            left_k = k
            q_passed = tl.load(scales_ptr + first + n, mask=is_token, other=0.0)
            k_left = tl.load(scales_ptr + stride + first + n, mask=is_token, other=0.0)
            whole = tl.load(scales_ptr + DECAYS * stride + first + count - 1)
        rounded = state.to(dtype)
        written = tl.trans(v).to(tl.float32)
        if IS_DELTA:
            solved = tl.load(parts.solved + head_row * CHUNK_TOKENS + of_square, mask=is_token[:, None], other=0.0)
            if BY_CHANNEL:
                k_passed = q_passed
            else:
                k_passed = tl.load(scales_ptr + 3 * stride + first + n, mask=is_token, other=0.0)
            read = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
            unread = written - read * k_passed[None, :]
            written = tl.dot(unread.to(dtype), tl.trans(solved), input_precision=PRECISION)
        left = (written * k_left[None, :]).to(dtype)
        out = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * q_passed[None, :]
        if not IS_DELTA:
            out += skip * written
        out = tl.dot(written.to(dtype), tl.trans(scores), out, input_precision=PRECISION)
        state = tl.dot(left, left_k, state * whole, input_precision=PRECISION)
        tl.store(out_ptr + head_row * VALUE_DIM + of_out, tl.trans(out).to(out_ptr.dtype.element_ty), mask=value_mask)
        if (number == num_chunks - 1) | ((chunk + 1) % CHUNKS == 0):
            target = tl.load(rows.places + first + count - 1) // BLOCK_SIZE
            tl.store(pool_ptr + target * pool_stride + places, tl.trans(state), mask=inside & (target > 0))
    if row == num_rows - 1:
        # Tokens after the last row.
        first = end
        while first < num_tokens:
            nothing = tl.zeros([CHUNK_TOKENS, VALUE_TILE], out_ptr.dtype.element_ty)
            head_row = first.to(tl.int64) * VALUE_HEADS + head
            is_nobody = (first + n < num_tokens)[:, None] & in_value[None, :]
            tl.store(out_ptr + head_row * VALUE_DIM + of_out, nothing, mask=is_nobody)
            first += CHUNK_TOKENS


def num_chunk_programs(num_tokens: int, rows: StateRows, chunk: int = CHUNK) -> int:
    """Return how many programs `find_chunk` needs for the rows after the decode rows of a step of `num_tokens`, which
    are cut into chunks of `chunk` tokens."""
    first_row, num_rows = rows.num_decode_rows, len(rows.slots)
    num_chunks: int = (num_tokens - first_row) * ceil_div(rows.block_size, chunk) // rows.block_size
    num_chunks += _MORE_CHUNKS.value * (num_rows - first_row)
    return num_chunks


def walk_chunks(
    qkv: Tensor, parts: ChunkParts, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, with zeros for tokens after the last row, and store their
    states. Shapes: as in `nvcli.kernels.recurrence.compute_rows`."""
    num_rows, first_row = len(rows.slots), rows.num_decode_rows
    num_states = (num_rows - first_row) * heads.num_value_heads
    tile, num_stages = _choose_tile(qkv, heads, num_states)
    _walk_kernel[num_rows - first_row, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
        qkv,
        parts,
        pool,
        out,
        RowTensors.of(rows),
        first_row,
        num_rows,
        len(qkv),
        qkv.stride(0),
        pool.stride(0),
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        VALUE_TILE=tile,
        PRECISION="tf32" if qkv.element_size() == 2 else "tf32x3",
        NUM_STAGES=num_stages,
        num_warps=_WARPS,
        num_stages=num_stages,
    )


def _choose_tile(qkv: Tensor, heads: RecurrentHeads, num_states: int) -> tuple[int, int]:
    """Return how many columns of a state a program has, and how many chunks it holds at a time, 48 KiB each with keys
    of 128."""
    tile = min(_TILE, max(16, next_power_of_2(heads.value_dim)))
    most_stages = shared_memory_bytes(qkv.device) // (64 << 10)
    if not qkv.is_cuda or qkv.element_size() > 2 or heads.key_dim > 128 or most_stages < _STAGES:
        return tile, 1
    num_programs = num_states * ceil_div(heads.value_dim, tile)
    if heads.rule == "scan":
        has_few = num_programs <= num_multiprocessors(qkv.device)
        return tile, min(most_stages, _FEW_STAGES) if has_few else _STAGES
    has_few = 2 * num_programs <= num_multiprocessors(qkv.device)
    return min(tile, _FEW_TILE) if has_few else tile, _STAGES
