"""Merging a low-rank product into a weight in Triton: see `nvcli.kernels.low_rank_merge`.

The base is read once and the weight written once. A weight of 16 bits takes products of the factors' own numbers, which
float32 holds exactly; one in float32 takes factors in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div

_ROWS, _COLUMNS = tl.constexpr(64), tl.constexpr(256)
"""The tile of a program."""
_RANKS = tl.constexpr(16)
"""Ranks that are multiplied at a time: what the tensor cores take at least, and what most adapters have."""


@triton.jit(do_not_specialize=["scaling", "num_rows", "rank", "up_row_stride"])
def _merge_kernel(
    out_ptr,  # [num_rows, num_columns], rows out_stride apart, written
    base_ptr,  # likewise
    up_ptr,  # [rank, num_rows], ranks up_stride apart
    down_ptr,  # [rank, num_columns], ranks down_stride apart
    scaling,
    num_rows,
    num_columns,
    rank,
    out_stride,
    base_stride,
    up_stride,
    up_row_stride,
    down_stride,
    IN_FLOAT32: tl.constexpr,
):
    """Program (tile of rows, tile of columns), those of the same rows after each other."""
    num_tiles = tl.cdiv(num_columns, _COLUMNS)
    rows = (tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) % num_tiles * _COLUMNS + tl.arange(0, _COLUMNS))[None, :]
    is_row, is_column = rows < num_rows, columns < num_columns
    sums = tl.zeros([_ROWS, _COLUMNS], tl.float32)
    for first in range(0, rank, _RANKS):
        ranks = first + tl.arange(0, _RANKS)
        of_rows, of_columns = ranks[None, :], ranks[:, None]
        up = tl.load(up_ptr + of_rows * up_stride + rows * up_row_stride, mask=is_row & (of_rows < rank), other=0.0)
        down = tl.load(down_ptr + of_columns * down_stride + columns, mask=is_column & (of_columns < rank), other=0.0)
        if IN_FLOAT32:
            up, down = up.to(tl.float32), down.to(tl.float32)
        sums = tl.dot(up, down, sums, input_precision="ieee")
    base = tl.load(base_ptr + rows * base_stride + columns, mask=is_row & is_column, other=0.0).to(tl.float32)
    merged = (base + scaling * sums).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * out_stride + columns, merged, mask=is_row & is_column)


def merge_low_rank(out: Tensor, base: Tensor, up: Tensor, down: Tensor, scaling: float) -> None:
    """See `nvcli.kernels.low_rank_merge.merge_low_rank`. The last dimension of all but `up` is dense."""
    assert out.stride(1) == base.stride(1) == down.stride(1) == 1
    assert up.dtype == down.dtype
    num_rows, num_columns = out.shape
    _merge_kernel[(ceil_div(num_rows, _ROWS.value) * ceil_div(num_columns, _COLUMNS.value),)](
        out,
        base,
        up,
        down,
        float(scaling),
        num_rows,
        num_columns,
        len(down),
        out.stride(0),
        base.stride(0),
        up.stride(0),
        up.stride(1),
        down.stride(0),
        IN_FLOAT32=out.dtype.itemsize == 4 or up.dtype.itemsize == 4,
        num_warps=8,
    )
