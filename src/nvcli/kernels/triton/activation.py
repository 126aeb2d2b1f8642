"""SiLU·mul (SwiGLU) in Triton. Each program takes one row and one stretch of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr,  # [T, 2 × SIZE], rows gate_up_row_stride apart
    out_ptr,  # [T, SIZE], written
    gate_up_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, chunk of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = gate_up_ptr + row * gate_up_row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `nvcli.kernels.activation.silu_and_mul`. [T, 2 I], last dimension dense → [T, I], contiguous."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    _silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4)
    return out
