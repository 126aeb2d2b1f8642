"""Quantising weights to FP8 in Triton with a scale for each row: see `nvcli.kernels.fp8.quantise_weight_to`.

A product that is to be added to a weight is added as its values are read, so that the sum is never stored.

It gives the bits of `quantise_weight` on the same device, which divides where quantising activations multiplies, and
where torch divides by a number on a GPU by multiplying with its inverse.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_types import FP8_MAX, LEAST_MAX

_MAX = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_MAX)
_COLUMNS = tl.constexpr(4096)


@triton.jit
def _load_sum(values_ptr, product_ptr, row, columns, factor, SIZE: tl.constexpr):
    places = row * SIZE + columns
    values = tl.load(values_ptr + places, mask=columns < SIZE, other=0).to(tl.float32)
    if product_ptr is not None:
        values = tl.fma(tl.load(product_ptr + places, mask=columns < SIZE, other=0), factor, values)
    return values


@triton.jit
def _quantise_rows_kernel(
    values_ptr,  # [R, SIZE], contiguous
    product_ptr,  # None, or [R, SIZE] float32, contiguous
    codes_ptr,  # [R, SIZE], contiguous, written
    scales_ptr,  # [R] float32, written
    factor,
    SIZE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Program (row)."""
    COLUMNS: tl.constexpr = min(_COLUMNS, triton.next_power_of_2(SIZE))
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([COLUMNS], tl.float32)
    for first in tl.static_range(0, SIZE, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        values = _load_sum(values_ptr, product_ptr, row, columns, factor, SIZE)
        largest = tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    largest_of_all = tl.reduce(largest, 0, _maximum)
    largest_of_all = tl.maximum(largest_of_all, _LEAST, propagate_nan=tl.PropagateNan.ALL)
    scale = largest_of_all * (1 / _MAX) if ON_GPU else tl.div_rn(largest_of_all, _MAX)
    for first in tl.static_range(0, SIZE, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        values = _load_sum(values_ptr, product_ptr, row, columns, factor, SIZE)
        codes = tl.clamp(tl.div_rn(values, scale), -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes_ptr + row * SIZE + columns, codes.to(tl.float8e4nv), mask=columns < SIZE)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def quantise_rows(
    values: Tensor, codes: Tensor, scales: Tensor, product: Tensor | None = None, factor: float = 0.0
) -> None:
    """Write the codes of `values` [R, C], to which factor × `product` [R, C] float32 is added, and the rows' scales
    [R]. All are contiguous."""
    assert values.is_contiguous()
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert product is None or product.is_contiguous()
    num_rows, size = values.shape
    _quantise_rows_kernel[(num_rows,)](
        values,
        product,
        codes,
        scales,
        factor,
        SIZE=size,
        ON_GPU=values.is_cuda,
        num_warps=8,
    )
