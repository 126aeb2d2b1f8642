"""Gates in Triton. Each program takes one row and one stretch of its columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.elementwise_settings import GateFunction
from nvcli.kernels.triton.elementwise.activation import softplus
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_BLOCK = 2048


@triton.jit
def _gate_kernel(
    values_ptr,  # [T, SIZE], read and written
    source_ptr,  # gates [T, SIZE / NEIGHBOURS], or with a weight rows [T, IN_SIZE] that make one; source_stride apart
    weight_ptr,  # None, or [IN_SIZE]
    source_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    FUNCTION: tl.constexpr,
    IN_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    await_kernel_before(DEPENDENT)
    values_ptrs = values_ptr + row * SIZE + columns
    values = tl.load(values_ptrs, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        features = tl.arange(0, triton.next_power_of_2(IN_SIZE))
        is_feature = features < IN_SIZE
        x = tl.load(source_ptr + row * source_stride + features, mask=is_feature, other=0.0).to(tl.float32)
        gate = tl.sum(x * tl.load(weight_ptr + features, mask=is_feature, other=0.0).to(tl.float32), 0)
    else:
        gates = source_ptr + row * source_stride + columns // NEIGHBOURS
        gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    factor = softplus(gate) if FUNCTION == "softplus" else tl.sigmoid(gate)
    if FUNCTION == "silu":
        factor *= gate
    tl.store(values_ptrs, (values * factor).to(values_ptr.dtype.element_ty), mask=inside)


def gate_values(values: Tensor, gates: Tensor, function: GateFunction = "sigmoid") -> Tensor:
    """See `nvcli.kernels.gates.gate_values`."""
    _launch(values, gates, None, function)
    return values


def gate_rows(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """See `nvcli.kernels.gates.gate_rows`."""
    _launch(values, x, weight, "sigmoid")
    return values


def _launch(values: Tensor, source: Tensor, weight: Tensor | None, function: GateFunction) -> None:
    num_rows, size = values.shape
    in_size = 1 if weight is None else source.shape[1]
    assert values.is_contiguous()
    assert source.stride(1) == 1
    block = min(_BLOCK, next_power_of_2(size))
    _gate_kernel[(num_rows, ceil_div(size, block))](
        values,
        source,
        weight,
        source.stride(0),
        SIZE=size,
        BLOCK=block,
        NEIGHBOURS=1 if weight is not None else size // source.shape[1],
        FUNCTION=function,
        IN_SIZE=in_size,
        **dependent(values.device),
    )
