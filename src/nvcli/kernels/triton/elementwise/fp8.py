"""FP8 codes in Triton: of activations alone, and of an activated MLP's; those of a norm's result are written in
`norm.py` and `sums/peer_memory.py`.

A program takes one row, or of a scaling by blocks as many groups of 128 as are enough work, and holds it in registers:
nothing but the codes and their scales is written. Values are first rounded as the kernels in two steps round them, so
that both give the same codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.activation import Activation
from nvcli.kernels.fp8_types import FP8_MAX, LEAST_MAX, QuantisedRows
from nvcli.kernels.triton.elementwise.activation import activate
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2, warps_of_row

FP8_GROUP = tl.constexpr(FP8_BLOCK)
_MAX = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_MAX)
_GROUPS_CHUNK = 1024
"""Columns of a program where each of a row's groups has its own scale."""
_LOADED_ELEMENTS = 8
"""Neighbours that a thread loads in 16 bytes, and holds of each part of a row."""
_WARP_PART = tl.constexpr(32 * _LOADED_ELEMENTS)
"""Columns of a part of a row that a warp holds."""
_MOST_WARPS = 16
_MANY_ROWS, _SHORT_ROW = 4096, 2048
_MANY_SHORT = tl.constexpr(8)
"""From _MANY_ROWS rows on, of at most _SHORT_ROW columns, a program holds this many of them. 131,072 rows of 512
columns are quantised in 48 µs instead of 80 on an H200."""
_SHARING_GROUPS = 32
"""Groups of a row of codes that a program rescales at a time."""


@triton.jit
def _encode(values, scales):
    """Return codes of values that are at most 448 × their scales, up to rounding. A multiplication takes one
    instruction where a division takes eight."""
    return (values * (1.0 / scales)).to(tl.float8e4nv)


@triton.jit
def store_quantised(
    values,  # [BLOCK] float32, 0 outside
    codes_ptr,  # the row's codes
    scales_ptr,  # the row's scales
    first,  # the first column, a multiple of BLOCK
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUPS: tl.constexpr,
):
    """Write the codes of BLOCK columns of a row and their scales: one, or BY_GROUPS one for each group.

    A thread writes eight codes at a time, not sixteen: it would otherwise load sixteen neighbours of the row, too, in
    two loads that each use half of what they bring."""
    if BY_GROUPS:
        NUM_GROUPS: tl.constexpr = BLOCK // FP8_GROUP
        tile = tl.reshape(values, (NUM_GROUPS, FP8_GROUP))
        scales = tl.maximum(tl.max(tl.abs(tile), axis=1), _LEAST) / _MAX
        group = tl.arange(0, NUM_GROUPS)
        columns = first + group[:, None] * FP8_GROUP + tl.arange(0, FP8_GROUP)[None, :]
        columns = tl.max_contiguous(columns, [1, 8])
        tl.store(codes_ptr + columns, _encode(tile, scales[:, None]), mask=columns < SIZE)
        tl.store(scales_ptr + first // FP8_GROUP + group, scales, mask=first + group * FP8_GROUP < SIZE)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), axis=0), _LEAST) / _MAX
        columns = tl.max_contiguous(tl.arange(0, BLOCK), 8)
        tl.store(codes_ptr + columns, _encode(values, scale), mask=columns < SIZE)
        tl.store(scales_ptr, scale)


@triton.jit
def store_row(
    x,  # [BLOCK], in the type that it is rounded to before it is quantised, 0 behind SIZE
    row,
    out_ptr,  # [T, SIZE], written
    scales_ptr,  # [T] or BY_GROUPS [T, SIZE / 128, rounded up] float32, written; None: the result is not quantised
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUPS: tl.constexpr,
):
    """Write a row of a norm's result, or its codes and scales."""
    if scales_ptr is None:
        columns = tl.arange(0, BLOCK)
        tl.store(out_ptr + row * SIZE + columns, x, mask=columns < SIZE)
    else:
        NUM_SCALES: tl.constexpr = (SIZE + FP8_GROUP - 1) // FP8_GROUP if BY_GROUPS else 1
        codes, scales = out_ptr + row * SIZE, scales_ptr + row * NUM_SCALES
        store_quantised(x.to(tl.float32), codes, scales, 0, SIZE, BLOCK, BY_GROUPS)


@triton.jit
def _load_values(
    source,
    columns,
    SIZE: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # all columns are within the row
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Return the values to quantise in some columns of the row at `source`, in its type; 0 outside."""
    inside = None if IS_WHOLE else columns < SIZE
    other = None if IS_WHOLE else 0.0
    values = tl.load(source + columns, mask=inside, other=other)
    if GATED:
        up = tl.load(source + SIZE + columns, mask=inside, other=other)
        values = (activate(values.to(tl.float32), GELU) * up.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def _quantise_kernel(
    x_ptr,  # [T, SIZE], or with GATED gates and what they multiply, [T, 2 × SIZE]; rows x_row_stride apart
    codes_ptr,  # [T, SIZE], written
    scales_ptr,  # [T, NUM_SCALES], written
    x_row_stride,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Program (row, part of PART columns), or with one scale for a row (row), which holds its parts in registers: rows
    are seldom powers of two, and what a program computes outside of its row costs as much as what is inside."""
    row = tl.program_id(0).to(tl.int64)
    source = x_ptr + row * x_row_stride
    codes_ptr += row * SIZE
    scales_ptr += row * NUM_SCALES
    if BY_GROUPS:
        first = tl.program_id(1) * PART
        values = _load_values(source, first + tl.arange(0, PART), SIZE, SIZE % PART == 0, GATED, GELU)
        store_quantised(values.to(tl.float32), codes_ptr, scales_ptr, first, SIZE, PART, BY_GROUPS=True)
    else:
        parts = ()
        largest = tl.zeros([PART], tl.float32)
        for i in tl.static_range((SIZE + PART - 1) // PART):
            columns = i * PART + tl.arange(0, PART)
            values = _load_values(source, columns, SIZE, (i + 1) * PART <= SIZE, GATED, GELU)
            parts += (values,)  # type: ignore[assignment]
            largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
        scale = tl.maximum(tl.max(largest, axis=0), _LEAST) / _MAX
        for i in tl.static_range((SIZE + PART - 1) // PART):
            columns = i * PART + tl.arange(0, PART)
            inside = None if (i + 1) * PART <= SIZE else columns < SIZE
            tl.store(codes_ptr + columns, _encode(parts[i].to(tl.float32), scale), mask=inside)
        tl.store(scales_ptr, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_short_rows_kernel(
    x_ptr,  # [T, SIZE], rows x_row_stride apart
    places_ptr,  # [T, COPIES] int32: the rows of codes that each gets, -1 for none; None: the one of its number
    codes_ptr,  # [T × COPIES, SIZE], written
    scales_ptr,  # [T × COPIES], written
    x_row_stride,
    num_rows,
    SIZE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Program (_MANY_SHORT rows), a warp for each, which holds its parts in registers."""
    PART: tl.constexpr = _WARP_PART
    rows = tl.program_id(0) * _MANY_SHORT + tl.arange(0, _MANY_SHORT)
    is_row = rows < num_rows
    source = x_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * x_row_stride
    parts = ()
    largest = tl.zeros([_MANY_SHORT, PART], tl.float32)
    for i in tl.static_range((SIZE + PART - 1) // PART):
        columns = i * PART + tl.arange(0, PART)[None, :]
        values = _load_values(source, columns, SIZE, (i + 1) * PART <= SIZE, GATED=False, GELU=False)
        parts += (values,)  # type: ignore[assignment]
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scales = tl.maximum(tl.max(largest, axis=1), _LEAST) / _MAX
    for copy in range(COPIES):
        places = rows
        is_written = is_row
        if places_ptr is not None:
            places = tl.load(places_ptr + rows * COPIES + copy, mask=is_row, other=-1)
            is_written = places >= 0
        codes_ptrs = codes_ptr + places.to(tl.int64)[:, None] * SIZE
        for i in tl.static_range((SIZE + PART - 1) // PART):
            columns = i * PART + tl.arange(0, PART)[None, :]
            inside = is_written[:, None] if (i + 1) * PART <= SIZE else is_written[:, None] & (columns < SIZE)
            tl.store(codes_ptrs + columns, _encode(parts[i].to(tl.float32), scales[:, None]), mask=inside)
        tl.store(scales_ptr + places, scales, mask=is_written)


@triton.jit(do_not_specialize=["num_rows"])
def _share_scales_kernel(
    codes_ptr,  # [T, GROUPS × 128] e4m3, overwritten
    exponents_ptr,  # [T, GROUPS] uint8
    scales_ptr,  # [T] float32, written
    num_rows,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,  # groups that are held at a time
    ROWS: tl.constexpr,
):
    """Program (ROWS rows)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = tl.arange(0, triton.next_power_of_2(GROUPS))
    inside = (rows < num_rows)[:, None] & (groups < GROUPS)[None, :]
    exponents_ptrs = exponents_ptr + rows[:, None] * GROUPS + groups[None, :]
    shared = tl.max(tl.load(exponents_ptrs, mask=inside, other=0).to(tl.int32), axis=1)
    tl.store(scales_ptr + rows, (shared << 23).to(tl.float32, bitcast=True), mask=rows < num_rows)
    for first in tl.static_range(0, GROUPS, PART):
        groups = first + tl.arange(0, PART)
        inside = tl.reshape((rows < num_rows)[:, None] & (groups < GROUPS)[None, :], [ROWS * PART])
        part = tl.reshape(rows[:, None] * GROUPS + groups[None, :], [ROWS * PART])
        own = tl.load(exponents_ptr + part, mask=inside, other=0).to(tl.int32)
        least = tl.reshape(tl.broadcast_to(shared[:, None], [ROWS, PART]), [ROWS * PART])
        factors = (tl.maximum(127 + own - least, 0) << 23).to(tl.float32, bitcast=True)
        places = codes_ptr + part[:, None] * FP8_GROUP + tl.arange(0, FP8_GROUP)[None, :]
        values = tl.load(places, mask=inside[:, None], other=0.0).to(tl.float32) * factors[:, None]
        tl.store(places, values.to(tl.float8e4nv), mask=inside[:, None])


def share_scales(codes: Tensor, exponents: Tensor) -> Tensor:
    """Give the groups of 128 in each row of codes [T, size] one scale, the largest of theirs, in place. `exponents`
    [T, size / 128] uint8 are those of the groups' scales, which are powers of two, as float32 has them → the scales [T]
    float32."""
    num_rows, num_groups = exponents.shape
    assert codes.is_contiguous()
    assert exponents.is_contiguous()
    assert codes.shape == (num_rows, num_groups * FP8_BLOCK)
    scales = torch.empty(num_rows, dtype=torch.float32, device=codes.device)
    part = min(next_power_of_2(num_groups), _SHARING_GROUPS)
    rows = _rows_together(num_rows, codes.shape[1])
    _share_scales_kernel[(ceil_div(num_rows, rows),)](
        codes,
        exponents,
        scales,
        num_rows,
        GROUPS=num_groups,
        PART=part,
        ROWS=rows,
        num_warps=warps_of_row(rows * part * FP8_BLOCK),
    )
    return scales


def quantise(x: Tensor, scaling: FP8Scaling) -> QuantisedRows:
    """See `nvcli.kernels.fp8.quantise`."""
    if scaling == "channel" and _rows_together(*x.shape) > 1:
        out = QuantisedRows.empty(len(x), x.shape[1], scaling, x)
        _quantise_short_rows(x, out)
        return out
    return _quantise(x, scaling)


def quantise_pairs(x: Tensor, places: Tensor, codes: Tensor) -> QuantisedRows:
    """Quantise each token's row by itself, and write it to the places of its pairs of token and expert: [T, H] →
    `codes` [T × k, H] e4m3, contiguous. places: [T × k] int32, -1 for a pair that has none."""
    out = QuantisedRows(codes, torch.empty(len(codes), dtype=torch.float32, device=x.device), x.dtype)
    _quantise_short_rows(x, out, places)
    return out


def _quantise_short_rows(x: Tensor, out: QuantisedRows, places: Tensor | None = None) -> None:
    """Quantise rows of x to `out`, in their order or at `places`."""
    assert x.stride(1) == 1
    num_rows, size = x.shape
    copies, num_warps = len(out.codes) // num_rows, _MANY_SHORT.value
    _quantise_short_rows_kernel[(ceil_div(num_rows, num_warps),)](
        x, places, out.codes, out.scales, x.stride(0), num_rows, SIZE=size, COPIES=copies, num_warps=num_warps
    )


def activate_and_quantise(gate_up: Tensor, activation: Activation, scaling: FP8Scaling) -> QuantisedRows:
    """See `nvcli.kernels.fp8.activate_and_quantise`."""
    return _quantise(gate_up, scaling, activation)


def _quantise(x: Tensor, scaling: FP8Scaling, activation: Activation | None = None) -> QuantisedRows:
    """Quantise rows, or with an activation that of gate and up projection."""
    num_rows, size = len(x), x.shape[1] // (1 if activation is None else 2)
    assert x.stride(1) == 1
    out = QuantisedRows.empty(num_rows, size, scaling, x)
    part = min(_block(size), _GROUPS_CHUNK if scaling == "block" else _WARP_PART.value * _warps_of_row(size))
    _quantise_kernel[(num_rows, ceil_div(size, part) if scaling == "block" else 1)](
        x,
        out.codes,
        out.scales,
        x.stride(0),
        SIZE=size,
        PART=part,
        NUM_SCALES=1 if scaling == "channel" else ceil_div(size, FP8_BLOCK),
        BY_GROUPS=scaling == "block",
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        num_warps=warps_of_row(part) if scaling == "block" else max(1, part // _WARP_PART.value),
    )
    return out


def _rows_together(num_rows: int, size: int) -> int:
    """Choose how many rows of `size` columns a program holds: one, or of many short ones several, which are read and
    written as fast as memory allows."""
    return _MANY_SHORT.value if num_rows >= _MANY_ROWS and size <= _SHORT_ROW else 1


def _block(size: int) -> int:
    """The columns that a program holds: whole groups, and a power of two."""
    return max(FP8_BLOCK, next_power_of_2(size))


def _warps_of_row(size: int) -> int:
    """The most warps of a program that holds a row of `size` columns in parts."""
    return _MOST_WARPS if size > 4096 else _MOST_WARPS // 2
