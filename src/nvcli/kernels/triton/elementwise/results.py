"""The sum of experts' results, in Triton. Each program takes one row and one stretch of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK = tl.constexpr(1024)
"""Columns of a program."""


@triton.jit(do_not_specialize=["num_rows"])
def _sum_results_kernel(
    parts_ptr,  # [PARTS, T, SIZE]
    experts_ptr,  # [T, CHOICES] int32, the experts of the first parts; None: all parts are there
    out_ptr,  # [T, SIZE], written
    num_rows,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHOICES: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk of _BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < SIZE
    await_kernel_before(DEPENDENT)
    total = tl.zeros([_BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        is_there = inside
        if part < CHOICES:
            held = tl.load(experts_ptr + row * CHOICES + part) - FIRST_EXPERT
            is_there = inside & (held >= 0) & (held < NUM_EXPERTS)
        source = parts_ptr + (part * num_rows.to(tl.int64) + row) * SIZE + columns
        total += tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_results(
    parts: Tensor, experts: Tensor | None = None, held: tuple[int, int] = (0, 0), out: Tensor | None = None
) -> Tensor:
    """See `nvcli.kernels.experts.sum_results`."""
    num_parts, num_rows, size = parts.shape
    assert parts.is_contiguous()
    if out is None:
        out = torch.empty(num_rows, size, dtype=parts.dtype, device=parts.device)
    assert out.is_contiguous()
    if num_rows:
        _sum_results_kernel[num_rows, ceil_div(size, _BLOCK.value)](
            parts,
            experts,
            out,
            num_rows,
            SIZE=size,
            PARTS=num_parts,
            CHOICES=0 if experts is None else experts.shape[1],
            FIRST_EXPERT=held[0],
            NUM_EXPERTS=held[1],
            **dependent(parts.device),
        )
    return out
