"""SwiGLU and GEGLU in Triton. Each program takes one row and one stretch of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK = tl.constexpr(1024)
"""Columns of a program."""
_SILU, _GELU = ExpertActivation(), ExpertActivation(kind="gelu_tanh")


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """silu(gate), or with GELU its tanh approximation: x (1 + tanh(y)) / 2 is x sigmoid(2 y). gate: float32."""
    argument = gate
    if GELU:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(argument)


@triton.jit
def gelu(x):
    """GELU by the error function. float32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """Clamp numbers to ±LIMIT; what is no number stays so."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def activate_gated(gate, up, ACTIVATION: tl.constexpr):
    """See `ExpertActivation`, of those with gates. float32."""
    if ACTIVATION.kind == "clamped_swiglu":
        LIMIT: tl.constexpr = ACTIVATION.limit
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        return gate * tl.sigmoid(ACTIVATION.alpha * gate) * (clamp(up, LIMIT) + ACTIVATION.offset)
    if ACTIVATION.kind == "gelu":
        return gelu(gate) * up
    if ACTIVATION.kind == "gated_relu2":
        return tl.where(gate <= 0.0, 0.0, gate * gate) * up
    factor = activate(gate, ACTIVATION.kind == "gelu_tanh")
    if ACTIVATION.kind == "clamped_silu":
        factor = tl.where(factor > ACTIVATION.limit, ACTIVATION.limit, factor)
        up = clamp(up, ACTIVATION.limit)
    return factor * up


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which is x where that is large."""
    e = tl.exp(tl.minimum(x, 20.0))
    # Three terms of the series of log(1 + e), where the sum would lose most of a small e.
    return tl.where(x > 20.0, x, tl.where(e < 0.01, e * (1.0 - e * (0.5 - e / 3.0)), tl.log(1.0 + e)))


@triton.jit
def _activate_and_mul_kernel(
    gate_ptr,  # [T, SIZE], rows gate_row_stride apart
    up_ptr,  # [T, SIZE], rows up_row_stride apart; None: each row stands behind its gates
    out_ptr,  # [T, SIZE], written
    sums_ptr,  # None, or [T, 2] float32: gates count above what `gelu_tanh_above_and_mul` says of these
    gate_row_stride,
    up_row_stride,
    COUNT: tl.constexpr,
    DEVIATIONS: tl.constexpr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # `ExpertActivation`
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk of _BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < SIZE
    await_kernel_before(DEPENDENT)
    source = gate_ptr + row * gate_row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    source = source + SIZE if up_ptr is None else up_ptr + row * up_row_stride + columns
    up = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if sums_ptr is not None:
        mean = tl.load(sums_ptr + 2 * row) / COUNT
        variance = tl.load(sums_ptr + 2 * row + 1) / COUNT - mean * mean
        gate -= mean + DEVIATIONS * tl.sqrt(tl.maximum(variance, 0.0))
        gate = tl.where(gate <= 0.0, 0.0, gate)
    result = activate_gated(gate, up, ACTIVATION)
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums_kernel(
    gate_ptr,  # [T, SIZE], rows gate_row_stride apart
    sums_ptr,  # [T, 2] float32, written
    gate_row_stride,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    await_kernel_before(DEPENDENT)
    total, squares = tl.zeros([_BLOCK], tl.float32), tl.zeros([_BLOCK], tl.float32)
    for start in range(0, SIZE, _BLOCK):
        columns = start + tl.arange(0, _BLOCK)
        gate = tl.load(gate_ptr + row * gate_row_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        total += gate
        squares += gate * gate
    tl.store(sums_ptr + 2 * row, tl.sum(total, axis=0))
    tl.store(sums_ptr + 2 * row + 1, tl.sum(squares, axis=0))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `nvcli.kernels.activation.silu_and_mul`. [T, 2 I], last dimension dense → [T, I], contiguous."""
    return _launch(gate_up, None, _SILU)


def activate_and_mul(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """See `nvcli.kernels.activation.activate_and_mul`. [T, 2 I], last dimension dense → [T, I], contiguous."""
    return _launch(gate_up, None, activation)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See `nvcli.kernels.activation.gelu_tanh_and_mul`. [T, 2 I], last dimension dense → [T, I], contiguous."""
    return _launch(gate_up, None, _GELU)


def gelu_tanh_times(gate: Tensor, values: Tensor) -> Tensor:
    """See `nvcli.kernels.activation.gelu_tanh_times`. [T, I] each, last dimensions dense → [T, I], contiguous."""
    return _launch(gate, values, _GELU)


def sums_of_gates(gate_up: Tensor) -> Tensor:
    """See `nvcli.kernels.activation.sums_of_gates`. Last dimension dense → contiguous."""
    assert gate_up.stride(1) == 1
    sums = torch.empty(len(gate_up), 2, dtype=torch.float32, device=gate_up.device)
    size = gate_up.shape[1] // 2
    _sums_kernel[(len(gate_up),)](gate_up, sums, gate_up.stride(0), SIZE=size, **dependent(gate_up.device))
    return sums


def gelu_tanh_above_and_mul(gate_up: Tensor, sums: Tensor, count: int, deviations: float) -> Tensor:
    """See `nvcli.kernels.activation.gelu_tanh_above_and_mul`. Last dimension dense → [T, I], contiguous."""
    assert sums.is_contiguous()
    return _launch(gate_up, None, _GELU, sums, count, deviations)


def _launch(
    gate: Tensor,
    up: Tensor | None,
    activation: ExpertActivation,
    sums: Tensor | None = None,
    count: int = 0,
    deviations: float = 0.0,
) -> Tensor:
    num_tokens, size = gate.shape
    size = size // 2 if up is None else size
    assert gate.stride(1) == 1
    assert up is None or up.stride(1) == 1
    out = torch.empty(num_tokens, size, dtype=gate.dtype, device=gate.device)
    _activate_and_mul_kernel[num_tokens, ceil_div(size, _BLOCK.value)](
        gate,
        up,
        out,
        sums,
        gate.stride(0),
        0 if up is None else up.stride(0),
        COUNT=count,
        DEVIATIONS=deviations,
        SIZE=size,
        ACTIVATION=activation,
        **dependent(gate.device),
    )
    return out
