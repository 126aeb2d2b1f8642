"""What kernels over recurrent states share: where a row lies, and which blocks its states come from and go to."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.state_rows import StateRows


@triton.jit
def row_span(row, seq_lens_ptr, starts_ptr):
    """Return a row's first token, the token behind its last one, and the tokens of its request before it."""
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    return start, end, tl.load(seq_lens_ptr + row) - (end - start)


@triton.jit
def row_of(row, slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE: tl.constexpr):
    """Return a row's first token, the token behind its last one, the tokens of its request before it, and the block of
    the state that it goes on from; 0: zeros."""
    start, end, before = row_span(row, seq_lens_ptr, starts_ptr)
    column = tl.maximum(before - 1, 0) // BLOCK_SIZE
    slot = tl.load(slots_ptr + row)
    source = tl.load(tables_ptr + slot * table_stride + column, mask=before > 0, other=0).to(tl.int64)
    return start, end, before, source


def row_arguments(rows: StateRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Return what kernels take for the rows: the tensors of `row_of`, the places of the tokens, the tables' stride."""
    assert rows.block_tables.stride(1) == rows.slot_mapping.stride(0) == 1
    return (
        rows.slots,
        rows.seq_lens,
        rows.query_start_loc,
        rows.slot_mapping,
        rows.block_tables,
        rows.block_tables.stride(0),
    )
