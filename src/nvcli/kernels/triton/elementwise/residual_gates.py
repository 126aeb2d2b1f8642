"""Gates between a block's result and the residual stream in Triton. Each program holds its row in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.residual_gate_settings import ResidualGates
from nvcli.kernels.triton.elementwise.norm import sum_of_parts
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import next_power_of_2, warps_of_row


@triton.jit
def _add_through_gate_kernel(
    x_ptr,  # [NUM_PARTS, T, SIZE], parts x_part_stride apart, rows x_row_stride
    residual_ptr,  # [T, SIZE], rows residual_row_stride apart, read and written
    gate_ptr,  # [SIZE] float32
    scale_ptr,  # [SIZE] float32; None: nothing is multiplied
    eps,
    temperature,
    least,
    x_part_stride,
    x_row_stride,
    residual_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row). residual = residual × √(1 - b²) + b × norm(x × scale), rounded once, where b = sigmoid(gate /
    temperature); x is the sum of NUM_PARTS parts. BLOCK is a power of two, at least SIZE."""
    row = tl.program_id(0).to(tl.int64)
    await_kernel_before(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    logits = tl.load(gate_ptr + columns, mask=inside, other=0.0) / temperature
    residual_ptrs = residual_ptr + row * residual_row_stride + columns
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    x = sum_of_parts(x_ptr + row * x_row_stride + columns, x_part_stride, inside, NUM_PARTS)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + columns, mask=inside, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    share = tl.sigmoid(logits)
    kept = tl.sqrt(tl.maximum(tl.sigmoid(-logits) * (1 + share), least))
    total = residual * kept + normed * share
    tl.store(residual_ptrs, total.to(residual_ptr.dtype.element_ty), mask=inside)


def add_through_gate(x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor | None, settings: ResidualGates) -> None:
    """See `nvcli.kernels.residual_gates.add_through_gate`. Last dimensions are dense."""
    parts = x if x.dim() == 3 else x.unsqueeze(0)
    num_parts, num_rows, size = parts.shape
    assert parts.stride(-1) == residual.stride(-1) == 1
    block = next_power_of_2(size)
    _add_through_gate_kernel[(num_rows,)](
        parts,
        residual,
        gate,
        scale,
        settings.norm_eps,
        settings.temperature,
        settings.least,
        parts.stride(0),
        parts.stride(1),
        residual.stride(0),
        SIZE=size,
        BLOCK=block,
        NUM_PARTS=num_parts,
        **dependent(x.device),
        num_warps=warps_of_row(block),
    )
