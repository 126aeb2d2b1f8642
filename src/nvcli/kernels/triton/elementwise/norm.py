"""RMSNorm in Triton: alone, with an addition, with a gate, or with FP8 codes for its result. Each program holds its
rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.elementwise_settings import NormGate
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.elementwise.fp8 import store_row
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2, warps_of_row


@triton.jit
def sum_of_parts(x_ptrs, part_stride, inside, NUM_PARTS: tl.constexpr):
    """Load a row's parts, part_stride apart, and add them up in float32."""
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        x += tl.load(x_ptrs + part * part_stride, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [NUM_PARTS, T, SIZE], parts x_part_stride apart, rows x_row_stride
    residual_ptr,  # [T, SIZE], rows residual_row_stride apart, written with ADD, and where there is no out_ptr
    weight_ptr,  # [SIZE]
    bias_ptr,  # [SIZE], added to the result; None: there is none
    out_ptr,  # [T, SIZE], written; None: the result is added to the residual
    scales_ptr,  # see `store_row`
    values_ptr,  # None, or [T, SIZE], the result before it is quantised, written
    scalar_ptr,  # None, or [1], a factor of that sum
    eps,
    x_part_stride,
    x_row_stride,
    residual_row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CENTERED: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row). out = norm(x) × weight, or residual = (residual + norm(x) × weight) × scalar, rounded after each
    step. With ADD: residual += x, rounded as it is stored, and the norm is that of the sum. x is the sum of NUM_PARTS
    parts; with CENTERED its mean is taken from it before it is normed. BLOCK is a power of two, at least SIZE."""
    row = tl.program_id(0).to(tl.int64)
    await_kernel_before(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    residual_ptrs = residual_ptr + row * residual_row_stride + columns
    # The loads are on their way before any is waited for.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if out_ptr is None:
        residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    x = sum_of_parts(x_ptr + row * x_row_stride + columns, x_part_stride, inside, NUM_PARTS)
    if ADD:
        total = (tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(residual_ptrs, total, mask=inside)
        x = total.to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    mean_square = tl.sum(x * x, axis=0) / SIZE
    normed = x * tl.rsqrt(mean_square + eps) * weight
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    values = normed.to(dtype)
    if values_ptr is not None:
        tl.store(values_ptr + row * SIZE + columns, values, mask=inside)
    if out_ptr is None:
        total = (residual + values.to(tl.float32)).to(dtype)
        if scalar_ptr is not None:
            total = (total.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
        tl.store(residual_ptrs, total, mask=inside)
    else:
        store_row(values, row, out_ptr, scales_ptr, SIZE, BLOCK, BY_GROUPS)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x_ptr,  # [T × NUM_HEADS, SIZE]
    gate_ptr,  # [T, NUM_HEADS, SIZE], tokens gate_stride apart
    weight_ptr,  # [SIZE], or with OWN_WEIGHTS [NUM_HEADS, SIZE]
    out_ptr,  # [T × NUM_HEADS, SIZE], written
    eps,
    gate_stride,
    num_rows,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    FUNCTION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile of ROWS heads): out = norm(x) × weight × FUNCTION(gate), or with GATES_FIRST norm(x ×
    FUNCTION(gate)) × weight."""
    await_kernel_before(DEPENDENT)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    inside = (row < num_rows) & (column < SIZE)
    x = tl.load(x_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gate_ptrs = gate_ptr + (row // NUM_HEADS) * gate_stride + (row % NUM_HEADS) * SIZE + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    if OWN_WEIGHTS:
        weight = tl.load(weight_ptr + (row % NUM_HEADS) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if FUNCTION == "silu":
        factor = gate * factor
    if GATES_FIRST:
        x *= factor
    mean_square = tl.sum(x * x, axis=1) / SIZE
    out = x * tl.rsqrt(mean_square + eps)[:, None] * weight
    if not GATES_FIRST:
        out *= factor
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool = False, function: NormGate = "silu"
) -> Tensor:
    """See `nvcli.kernels.norm.gated_rms_norm`."""
    num_tokens, num_heads, size = x.shape
    assert x.is_contiguous()
    assert gate.stride()[1:] == (size, 1)
    assert weight.is_contiguous()
    out = torch.empty_like(x)
    num_rows, block = num_tokens * num_heads, next_power_of_2(size)
    rows = max(1, 1024 // block)
    _gated_rms_norm_kernel[ceil_div(num_rows, rows),](
        x,
        gate,
        weight,
        out,
        eps,
        gate.stride(0),
        num_rows,
        NUM_HEADS=num_heads,
        SIZE=size,
        ROWS=rows,
        OWN_WEIGHTS=weight.dim() == 2,
        GATES_FIRST=gates_first,
        FUNCTION=function,
        **dependent(x.device),
        num_warps=4 if block <= 1024 else 8,
    )
    return out


@triton.jit
def _norm_parts_kernel(
    x_ptr,  # [T, SIZE]
    weight_ptr,  # [SIZE]; None: there is none
    out_ptr,  # [T, SIZE], written
    eps,
    SIZE: tl.constexpr,
    SIZES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row). SIZES are those of the parts, whose sum is SIZE."""
    await_kernel_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, triton.next_power_of_2(SIZE))
    x = tl.load(x_ptr + place + column, mask=column < SIZE, other=0.0).to(tl.float32)
    factor = tl.zeros(column.shape, tl.float32)
    start = 0
    for part in tl.static_range(len(SIZES)):
        end = start + SIZES[part]
        is_own = (column >= start) & (column < end)
        mean_square = tl.sum(tl.where(is_own, x * x, 0.0), axis=0) / SIZES[part]
        factor = tl.where(is_own, tl.rsqrt(mean_square + eps), factor)
        start = end
    out = x * factor
    if weight_ptr is not None:
        out *= tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + place + column, out.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def norm_parts(x: Tensor, weight: Tensor | None, eps: float, sizes: tuple[int, ...]) -> Tensor:
    """See `nvcli.kernels.norm.norm_parts`. x: contiguous."""
    assert x.is_contiguous()
    out, size = torch.empty_like(x), sum(sizes)
    block = next_power_of_2(size)
    _norm_parts_kernel[(len(x),)](
        x, weight, out, eps, SIZE=size, SIZES=sizes, **dependent(x.device), num_warps=warps_of_row(block)
    )
    return out


@triton.jit
def _squares_kernel(
    x_ptr,  # [T, sum of SIZES], rows row_stride apart
    squares_ptr,  # [T, parts] float32, written
    row_stride,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least the largest of SIZES
    DEPENDENT: tl.constexpr,
):
    """Program (row, part)."""
    await_kernel_before(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    first = 0
    for index in tl.static_range(len(SIZES)):
        if part == index:
            places = x_ptr + row * row_stride + first + column
            x = tl.load(places, mask=column < SIZES[index], other=0.0).to(tl.float32)
            tl.store(squares_ptr + row * len(SIZES) + index, tl.sum(x * x, axis=0))
        first += SIZES[index]


@triton.jit
def _norm_shared_parts_kernel(
    x_ptr,  # [T, sum of SIZES], rows row_stride apart, read and written
    squares_ptr,  # [T, parts] float32
    weight_ptrs,  # for each part [its size]
    eps,
    row_stride,
    SIZES: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK: tl.constexpr,  # as for _squares_kernel
    DEPENDENT: tl.constexpr,
):
    """Program (row, part)."""
    await_kernel_before(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    first = 0
    for index in tl.static_range(len(SIZES)):
        if part == index:
            inside = column < SIZES[index]
            places = x_ptr + row * row_stride + first + column
            square = tl.load(squares_ptr + row * len(SIZES) + index)
            out = tl.load(places, mask=inside, other=0.0).to(tl.float32) * tl.rsqrt(square / WIDTHS[index] + eps)
            out *= tl.load(weight_ptrs[index] + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(places, out.to(x_ptr.dtype.element_ty), mask=inside)
        first += SIZES[index]


def squares_of_parts(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """See `nvcli.kernels.norm.squares_of_parts`. Last dimension dense → contiguous."""
    assert x.stride(1) == 1
    squares = torch.empty(len(x), len(sizes), dtype=torch.float32, device=x.device)
    block = next_power_of_2(max(sizes))
    _squares_kernel[len(x), len(sizes)](
        x, squares, x.stride(0), SIZES=sizes, BLOCK=block, **dependent(x.device), num_warps=warps_of_row(block)
    )
    return squares


def norm_shared_parts(
    x: Tensor, squares: Tensor, weights: tuple[Tensor, ...], eps: float, widths: tuple[int, ...]
) -> None:
    """See `nvcli.kernels.norm.norm_shared_parts`. Last dimension of `x` dense, `squares` contiguous."""
    assert x.stride(1) == 1
    assert squares.is_contiguous()
    sizes = tuple(len(weight) for weight in weights)
    block = next_power_of_2(max(sizes))
    _norm_shared_parts_kernel[len(x), len(sizes)](
        x,
        squares,
        weights,
        eps,
        x.stride(0),
        SIZES=sizes,
        WIDTHS=widths,
        BLOCK=block,
        **dependent(x.device),
        num_warps=warps_of_row(block),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False, bias: Tensor | None = None) -> Tensor:
    """See `nvcli.kernels.norm.rms_norm`. x: [..., H], its last dimension dense → [..., H], contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, rows, weight, out, eps, is_centered=is_centered, bias=bias)
    return out


def add_rms_norm(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    is_centered: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """See `nvcli.kernels.norm.add_rms_norm`. The last dimensions are dense → [T, H], contiguous."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _launch(delta, residual, weight, out, eps, add=True, is_centered=is_centered, bias=bias)
    return out


def sum_rms_norm(parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `nvcli.kernels.norm.sum_rms_norm`. The last dimension is dense → [T, H], contiguous."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _launch(parts, out, weight, out, eps)
    return out


def add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> None:
    """See `nvcli.kernels.norm.add_normed`. Last dimensions are dense."""
    _launch(x, residual, weight, None, eps, scalar=scalar)


def norm_and_quantise(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scaling: FP8Scaling,
    *,
    is_centered: bool,
    keeps_values: bool = False,
) -> QuantisedRows:
    """See `nvcli.kernels.fp8.norm_and_quantise`. Last dimensions are dense."""
    num_rows, size = residual.shape
    out = QuantisedRows.empty(num_rows, size, scaling, residual)
    if keeps_values:
        out = out._replace(values=torch.empty(num_rows, size, dtype=residual.dtype, device=residual.device))
    x = residual if delta is None else delta
    _launch(x, residual, weight, out, eps, add=delta is not None, is_centered=is_centered)
    return out


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Activations | None,
    eps: float,
    *,
    add: bool = False,
    is_centered: bool = False,
    bias: Tensor | None = None,
    scalar: Tensor | None = None,
) -> None:
    """Launch the kernel for rows [T, H], or for parts of them [P, T, H]."""
    codes = out if isinstance(out, QuantisedRows) else None
    parts = x if x.dim() == 3 else x.unsqueeze(0)
    num_parts, num_rows, size = parts.shape
    assert parts.stride(-1) == residual.stride(-1) == 1
    block = next_power_of_2(size) if codes is None else max(FP8_BLOCK, next_power_of_2(size))
    _rms_norm_kernel[(num_rows,)](
        parts,
        residual,
        weight,
        bias,
        out if codes is None else codes.codes,
        None if codes is None else codes.scales,
        None if codes is None else codes.values,
        scalar,
        eps,
        parts.stride(0),
        parts.stride(1),
        residual.stride(0),
        SIZE=size,
        BLOCK=block,
        ADD=add,
        NUM_PARTS=num_parts,
        CENTERED=is_centered,
        BY_GROUPS=codes is not None and codes.scaling == "block",
        **(dependent(x.device) if codes is None else {"DEPENDENT": False}),
        num_warps=warps_of_row(block),
    )
