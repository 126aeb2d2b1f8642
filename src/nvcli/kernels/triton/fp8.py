"""FP8 codes in Triton: of activations alone, of a norm's result, and of an activated MLP's.

A program takes one row, or of a scaling by blocks as many groups of 128 as are enough work, and holds it in registers:
nothing but the codes and their scales is written. What is quantised is rounded first as the kernels in two steps round
it, so that both give the same codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, FP8_MAX, LEAST_MAX, QuantisedRows
from nvcli.kernels.triton.activation import activate
from nvcli.kernels.triton.norm import normed_row
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling

_GROUP = tl.constexpr(FP8_BLOCK)
_MAX = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_MAX)
_CHUNK = 1024
"""Columns of a program where a row's groups have nothing to do with each other."""
_THREAD_ELEMENTS = 16


@triton.jit
def _encode(values, scales):
    scaled = values / scales
    scaled = tl.where(scaled > _MAX, _MAX, scaled)  # NaN stays NaN
    return tl.where(scaled < -_MAX, -_MAX, scaled).to(tl.float8e4nv)


@triton.jit
def _store_quantised(
    values,  # [BLOCK] float32, 0 outside
    codes_ptr,  # the row's codes
    scales_ptr,  # the row's scales
    first,  # the first column, a multiple of BLOCK
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUPS: tl.constexpr,
):
    """Write the codes of BLOCK columns of a row and their scales: one, or BY_GROUPS one for each group."""
    if BY_GROUPS:
        NUM_GROUPS: tl.constexpr = BLOCK // _GROUP
        tile = tl.reshape(values, (NUM_GROUPS, _GROUP))
        scales = tl.maximum(tl.max(tl.abs(tile), axis=1), _LEAST) / _MAX
        group = tl.arange(0, NUM_GROUPS)
        columns = first + group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        tl.store(codes_ptr + columns, _encode(tile, scales[:, None]), mask=columns < SIZE)
        tl.store(scales_ptr + first // _GROUP + group, scales, mask=first + group * _GROUP < SIZE)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), axis=0), _LEAST) / _MAX
        columns = tl.arange(0, BLOCK)
        tl.store(codes_ptr + columns, _encode(values, scale), mask=columns < SIZE)
        tl.store(scales_ptr, scale)


@triton.jit
def _quantise_kernel(
    x_ptr,  # [T, SIZE], or with GATED gates and what they multiply, [T, 2 × SIZE]; rows x_row_stride apart
    codes_ptr,  # [T, SIZE], written
    scales_ptr,  # [T, NUM_SCALES], written
    x_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Program (row, chunk of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = x_ptr + row * x_row_stride + columns
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
        values = (activate(values, GELU) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_quantised(
        values, codes_ptr + row * SIZE, scales_ptr + row * NUM_SCALES, first, SIZE, BLOCK, BY_GROUPS=BY_GROUPS
    )


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,  # [T, SIZE], written
    scales_ptr,  # [T, NUM_SCALES], written
    eps,
    x_part_stride,
    x_row_stride,
    residual_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    ADD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Program (row): the codes of `normed_row`."""
    row = tl.program_id(0).to(tl.int64)
    values = normed_row(
        x_ptr,
        residual_ptr,
        weight_ptr,
        row,
        eps,
        x_part_stride,
        x_row_stride,
        residual_row_stride,
        SIZE,
        BLOCK,
        ADD,
        NUM_PARTS,
        CENTERED,
    )
    values = values.to(residual_ptr.dtype.element_ty).to(tl.float32)
    _store_quantised(values, codes_ptr + row * SIZE, scales_ptr + row * NUM_SCALES, 0, SIZE, BLOCK, BY_GROUPS=BY_GROUPS)


def quantise(x: Tensor, scaling: FP8Scaling) -> QuantisedRows:
    """See `nvcli.kernels.fp8.quantise`."""
    return _quantise(x, x.shape[1], scaling, gated=False, gelu=False)


def activate_and_quantise(gate_up: Tensor, scaling: FP8Scaling, *, is_gelu: bool) -> QuantisedRows:
    """See `nvcli.kernels.fp8.activate_and_quantise`."""
    return _quantise(gate_up, gate_up.shape[1] // 2, scaling, gated=True, gelu=is_gelu)


def norm_and_quantise(
    delta: Tensor | None, residual: Tensor, weight: Tensor, eps: float, scaling: FP8Scaling, *, is_centered: bool
) -> QuantisedRows:
    """See `nvcli.kernels.fp8.norm_and_quantise`. Last dimensions are dense."""
    num_rows, size = residual.shape
    out = _empty(num_rows, size, scaling, residual)
    x = residual if delta is None else delta
    parts = x if x.dim() == 3 else x.unsqueeze(0)
    assert parts.stride(-1) == residual.stride(-1) == 1
    block = _block(size)
    _norm_kernel[(num_rows,)](
        parts,
        residual,
        weight,
        out.codes,
        out.scales,
        eps,
        parts.stride(0),
        parts.stride(1),
        residual.stride(0),
        SIZE=size,
        BLOCK=block,
        NUM_SCALES=_num_scales(size, scaling),
        BY_GROUPS=scaling == "block",
        ADD=delta is not None,
        NUM_PARTS=parts.shape[0],
        CENTERED=is_centered,
        num_warps=_num_warps(block),
    )
    return out


def _quantise(x: Tensor, size: int, scaling: FP8Scaling, *, gated: bool, gelu: bool) -> QuantisedRows:
    num_rows = x.shape[0]
    assert x.stride(1) == 1
    out = _empty(num_rows, size, scaling, x)
    block = _block(size)
    if scaling == "block":
        block = min(block, _CHUNK)
    _quantise_kernel[(num_rows, triton.cdiv(size, block))](
        x,
        out.codes,
        out.scales,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        NUM_SCALES=_num_scales(size, scaling),
        BY_GROUPS=scaling == "block",
        GATED=gated,
        GELU=gelu,
        num_warps=_num_warps(block),
    )
    return out


def _empty(num_rows: int, size: int, scaling: FP8Scaling, like: Tensor) -> QuantisedRows:
    shape = (num_rows,) if scaling == "channel" else (num_rows, _num_scales(size, scaling))
    return QuantisedRows(
        torch.empty(num_rows, size, dtype=FP8, device=like.device),
        torch.empty(shape, dtype=torch.float32, device=like.device),
        like.dtype,
    )


def _num_scales(size: int, scaling: FP8Scaling) -> int:
    return 1 if scaling == "channel" else -(-size // FP8_BLOCK)


def _block(size: int) -> int:
    """The columns that a program holds: whole groups, and a power of two."""
    return max(FP8_BLOCK, int(triton.next_power_of_2(size)))


def _num_warps(block: int) -> int:
    return min(max(block // (32 * _THREAD_ELEMENTS), 1), 16)
