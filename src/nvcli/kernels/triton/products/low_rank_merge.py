"""Merging a low-rank product into a weight in Triton: see `nvcli.kernels.low_rank_merge`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div

_ROWS, _COLUMNS, _RANKS = 64, 128, 16


@triton.jit(do_not_specialize=["rank", "scaling"])
def _merge_kernel(
    out_ptr,  # [R, C], rows out_stride apart, written
    base_ptr,  # [R, C], rows base_stride apart
    up_ptr,  # [rank, R]
    down_ptr,  # [rank, C], rows down_stride apart
    out_stride,
    base_stride,
    up_rank_stride,
    up_row_stride,
    down_stride,
    num_rows,
    num_columns,
    rank,
    scaling,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Program (tile of columns, tile of rows)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    is_inside = is_row[:, None] & is_column[None, :]
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        is_rank = ranks < rank
        up = tl.load(
            up_ptr + ranks[None, :].to(tl.int64) * up_rank_stride + rows[:, None].to(tl.int64) * up_row_stride,
            mask=is_rank[None, :] & is_row[:, None],
            other=0.0,
        ).to(tl.float32)
        down = tl.load(
            down_ptr + ranks[:, None].to(tl.int64) * down_stride + columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)
        product = tl.dot(up, down, product, input_precision="ieee")
    base = tl.load(
        base_ptr + rows[:, None].to(tl.int64) * base_stride + columns[None, :], mask=is_inside, other=0.0
    ).to(tl.float32)
    merged = (base + scaling * product).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * out_stride + columns[None, :], merged, mask=is_inside)


def merge_low_rank(out: Tensor, base: Tensor, up: Tensor, down: Tensor, scaling: float) -> None:
    """See `nvcli.kernels.low_rank_merge.merge_low_rank`."""
    num_rows, num_columns = out.shape
    assert base.shape == out.shape
    assert all(one.stride(1) == 1 for one in (out, base, down))
    _merge_kernel[(ceil_div(num_columns, _COLUMNS), ceil_div(num_rows, _ROWS))](
        out,
        base,
        up,
        down,
        out.stride(0),
        base.stride(0),
        *up.stride(),
        down.stride(0),
        num_rows,
        num_columns,
        len(up),
        scaling,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        RANKS=_RANKS,
    )
