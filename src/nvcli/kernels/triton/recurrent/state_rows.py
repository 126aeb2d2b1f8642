"""The rows of a step in kernels over recurrent states: their tokens, and the block that each row's state comes from."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.state_rows import StateRows


class RowTensors(NamedTuple):
    """The tensors of `StateRows`, in the form that kernels take."""

    slots: Tensor
    """[R] int64."""
    seq_lens: Tensor
    """[R] int32."""
    starts: Tensor
    """[R + 1] int32, first token of each row."""
    places: Tensor
    """[T] int64, block × block_size + offset of each token."""
    tables: Tensor
    """[slots, max_blocks] int32, rows `table_stride` apart."""
    table_stride: int

    @classmethod
    def of(cls, rows: StateRows) -> RowTensors:
        tables = rows.block_tables
        assert tables.stride(1) == rows.slot_mapping.stride(0) == 1
        return cls(rows.slots, rows.seq_lens, rows.query_start_loc, rows.slot_mapping, tables, tables.stride(0))


@triton.jit
def row_span(row, rows):
    """Return a row's first token, the token after its last one, and the number of tokens of its request before the
    row."""
    start = tl.load(rows.starts + row)
    end = tl.load(rows.starts + row + 1)
    return start, end, tl.load(rows.seq_lens + row) - (end - start)


@triton.jit
def row_of(row, rows, BLOCK_SIZE: tl.constexpr):
    """Return a row's first token, the token after its last one, the number of tokens of its request before the row, and
    the block of the state that it continues from; 0: zeros."""
    start, end, before = row_span(row, rows)
    column = tl.maximum(before - 1, 0) // BLOCK_SIZE
    slot = tl.load(rows.slots + row)
    source = tl.load(rows.tables + slot * rows.table_stride + column, mask=before > 0, other=0).to(tl.int64)
    return start, end, before, source


@triton.jit
def chunk_of(position, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of the chunk that a position of a request is in."""
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK - 1) // CHUNK
    return position // BLOCK_SIZE * CHUNKS + position % BLOCK_SIZE // CHUNK


@triton.jit
def chunk_tokens(chunk, start, end, before, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return a row's first token in a chunk, and the number of its tokens there."""
    CHUNKS: tl.constexpr = (BLOCK_SIZE + CHUNK - 1) // CHUNK
    block = chunk // CHUNKS * BLOCK_SIZE
    first = block + chunk % CHUNKS * CHUNK
    last = tl.minimum(tl.minimum(first + CHUNK, block + BLOCK_SIZE), before + end - start)
    first = tl.maximum(first, before)
    return start + first - before, last - first


@triton.jit
def row_of_token(token, starts_ptr, first_row, num_rows, num_halvings):
    """Return the last of rows `first_row` to `num_rows` that begins at or before a token."""
    low = first_row
    high = num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low
