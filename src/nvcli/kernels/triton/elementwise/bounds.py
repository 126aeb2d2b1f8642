"""Bounds of projections and the soft cap of logits in Triton: see `nvcli.kernels.bounds`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_fold import soft_capped
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK = tl.constexpr(1024)
"""Columns of a program."""
_CAPPED = 4096
"""Numbers that a program caps."""


@triton.jit
def _clamp_kernel(
    x_ptr,  # [n, T, SIZE], parts x_part_stride apart, rows x_row_stride
    low_ptr,  # [n]
    high_ptr,  # [n]
    out_ptr,  # [n, T, SIZE], parts out_part_stride apart, rows out_row_stride, written
    x_part_stride,
    x_row_stride,
    out_part_stride,
    out_row_stride,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk of _BLOCK columns, part). NaN stays NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < SIZE
    await_kernel_before(DEPENDENT)
    low, high = tl.load(low_ptr + part).to(tl.float32), tl.load(high_ptr + part).to(tl.float32)
    x = tl.load(x_ptr + part * x_part_stride + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x < low, low, x)
    x = tl.where(x > high, high, x)
    out = out_ptr + part * out_part_stride + row * out_row_stride + columns
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _soft_cap_kernel(
    x_ptr,  # [size], read and written
    size,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (chunk of BLOCK numbers)."""
    numbers = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = numbers < size
    await_kernel_before(DEPENDENT)
    x = tl.load(x_ptr + numbers, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + numbers, soft_capped(x, CAP).to(x_ptr.dtype.element_ty), mask=inside)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See `nvcli.kernels.bounds.soft_cap`."""
    assert x.is_contiguous()
    _soft_cap_kernel[(ceil_div(x.numel(), _CAPPED),)](
        x, x.numel(), CAP=cap, BLOCK=_CAPPED, **dependent(x.device), num_warps=4
    )
    return x


def clamp_to_each(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """See `nvcli.kernels.bounds.clamp_to_each`. The last dimension of x is dense; the result is contiguous."""
    out = torch.empty(len(low), *x.shape, dtype=x.dtype, device=x.device)
    _launch(x.expand(len(low), -1, -1), low, high, out)
    return out


def clamp_parts(x: Tensor, low: Tensor, high: Tensor) -> None:
    """See `nvcli.kernels.bounds.clamp_parts`."""
    parts = x.view(len(x), len(low), -1).transpose(0, 1)
    _launch(parts, low, high, parts)


def _launch(x: Tensor, low: Tensor, high: Tensor, out: Tensor) -> None:
    num_parts, num_rows, size = x.shape
    assert x.stride(2) == out.stride(2) == 1
    strides = *x.stride()[:2], *out.stride()[:2]
    _clamp_kernel[num_rows, ceil_div(size, _BLOCK.value), num_parts](
        x, low, high, out, *strides, SIZE=size, **dependent(x.device), num_warps=4
    )
