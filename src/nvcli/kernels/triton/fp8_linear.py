"""Products of activations and FP8 weights: x Wᵀ.

A program multiplies a tile of rows by a tile of features, and by a part of the input features where the norm behind the
product adds up the parts. FP8 units, which keep about 14 bits of a sum, add up products of 128 input features, and
these sums are added up in float32: left to the units, 4,096 products of one sign lose 8 %, and of random signs 0.3 %.
With scales by blocks, every row has one for these 128 features and the features of the tile have another, and each sum
is scaled; scales of rows are applied to the whole.

Hopper's units take 64 or more rows of their first operand and as few as 8 of their second. So with fewer rows than
features in a tile the features come first, and few rows are multiplied as fast as the weight is read. Tiles of rows
that share features run at the same time, and find the weight in the L2 cache. The tensor memory accelerator fetches
both and fills up what is missing with zeros.

Activations are in FP8, or plain: then each tile of codes is turned into their type, exactly, and multiplied so, which
serves GPUs without FP8 units. The bits of a code, put where a larger type has such ones, are a power of two too small.

No number of rows or features is specialised: a launch is compiled once for all shapes. Shapes: T rows, `in` and `out`
features, G = in / 128, rounded up, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.fp8_launches import DecodeLaunch, Launch
from nvcli.kernels.triton.operands import (
    codes_for,
    dot,
    has_rows_first,
    load_row_scales,
    max_imprecise,
    scaled_dot,
    zeros,
)
from nvcli.kernels.weight_formats import FP8_BLOCK
from nvcli.kernels.whole_numbers import ceil_div

_ROWS_TOGETHER = 8
"""Tiles of rows that are taken in turn before the next features."""
_PLAIN = (
    (16, Launch(16, 64, 128, 3, 4)),
    (32, Launch(32, 64, 128, 3, 4)),
    (64, Launch(64, 64, 64, 3, 4)),
    (128, Launch(128, 128, 64, 3, 8)),
)
"""Launches for up to so many rows of plain activations; the last one holds above its range, too. Not measured: their
tiles fit the 99 KiB of shared memory of the smallest GPUs without FP8 units."""


def choose_plain_launch(num_rows: int) -> Launch:
    """Choose the launch for so many rows of plain activations."""
    return next((launch for most_rows, launch in _PLAIN if num_rows <= most_rows), _PLAIN[-1][1])


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear_kernel(
    x,  # descriptor of [T, in], QUANTISED in e4m3, tiles [ROW_TILE, IN_TILE]
    x_scales_ptr,  # QUANTISED: [T] float32, or BY_BLOCKS [T, G]
    weight,  # descriptor of [out, in] e4m3, for plain x uint8, tiles [OUT_TILE, IN_TILE]
    weight_scales_ptr,  # [out] float32, or BY_BLOCKS [out / 128, rounded up, G]
    out_ptr,  # [P, T, out], written
    num_rows,
    out_features,
    in_features,
    part_features,  # of every part but the last, a multiple of IN_TILE
    QUANTISED: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (tile, part)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    band = ROWS_TOGETHER * tl.cdiv(out_features, OUT_TILE)
    first = tile // band * ROWS_TOGETHER
    rows_together = tl.minimum(row_tiles - first, ROWS_TOGETHER)
    row = (first + tile % band % rows_together) * ROW_TILE
    feature = tile % band // rows_together * OUT_TILE
    rows = row + tl.arange(0, ROW_TILE)
    features = feature + tl.arange(0, OUT_TILE)
    is_row, is_feature = rows < num_rows, features < out_features
    num_groups = tl.cdiv(in_features, GROUP)
    x_scale_ptrs = x_scales_ptr + rows.to(tl.int64) * num_groups
    weight_scale_ptr = weight_scales_ptr + feature // GROUP * num_groups
    total = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    first_inner = part * part_features
    for start in tl.range(
        first_inner, tl.minimum(first_inner + part_features, in_features), IN_TILE, num_stages=NUM_STAGES
    ):
        x_tile = x.load([row, start])
        weight_tile = weight.load([feature, start])
        if BY_BLOCKS:
            group = start // GROUP
            row_scales = load_row_scales(x_scale_ptrs + group, is_row, QUANTISED)
            scales = row_scales * tl.load(weight_scale_ptr + group)
            total = scaled_dot(x_tile, weight_tile, scales, total, ROWS_FIRST)
        else:
            total = dot(x_tile, weight_tile, total, ROWS_FIRST, MAX_IMPRECISE)
    if not ROWS_FIRST:
        total = total.T
    if not BY_BLOCKS:
        row_scales = load_row_scales(x_scales_ptr + rows, is_row, QUANTISED)
        total *= row_scales[:, None] * tl.load(weight_scales_ptr + features, mask=is_feature, other=0.0)[None, :]
    out_rows = part.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None] * out_features + features[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_feature[None, :])


def fp8_linear(
    x: Activations, weight: Tensor, scales: Tensor, launch: Launch | DecodeLaunch, out: Tensor | None = None
) -> Tensor:
    """See `nvcli.kernels.fp8.fp8_linear` and `fp8_weight_linear`, without a bias. `in` is a multiple of 16, and the
    launch takes one part."""
    assert launch.num_parts == 1
    if isinstance(launch, DecodeLaunch):
        return _decode_linear(x, weight, scales, launch, out)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=weight.device)
    _multiply(x, weight, scales, launch, out)
    return out


def fp8_linear_for_sum(x: QuantisedRows, weight: Tensor, scales: Tensor, launch: Launch | DecodeLaunch) -> Tensor:
    """See `nvcli.kernels.fp8.fp8_linear_for_sum`. `in` is a multiple of 16."""
    if isinstance(launch, DecodeLaunch):
        return _decode_linear(x, weight, scales, launch, None)
    if launch.num_parts == 1:
        return fp8_linear(x, weight, scales, launch)
    shape = (launch.num_parts, x.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=torch.float32, device=weight.device)
    _multiply(x, weight, scales, launch, out)
    return out


def _decode_linear(x: Activations, weight: Tensor, scales: Tensor, launch: DecodeLaunch, out: Tensor | None) -> Tensor:
    from nvcli.kernels.triton import hopper_fp8_decode

    assert isinstance(x, QuantisedRows)
    return hopper_fp8_decode.linear(x, weight, scales, launch, out)


def _multiply(x: Activations, weight: Tensor, scales: Tensor, launch: Launch, out: Tensor) -> None:
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    numbers, row_scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x.contiguous(), scales)
    assert numbers.is_contiguous()
    assert row_scales.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert out.is_contiguous()
    if num_rows == 0:
        return
    num_tiles = ceil_div(num_rows, launch.row_tile) * ceil_div(out_features, launch.out_tile)
    part_features = ceil_div(ceil_div(in_features, launch.in_tile), launch.num_parts) * launch.in_tile
    _fp8_linear_kernel[(num_tiles, launch.num_parts)](
        TensorDescriptor.from_tensor(numbers, [launch.row_tile, launch.in_tile]),
        row_scales,
        TensorDescriptor.from_tensor(codes_for(x, weight), [launch.out_tile, launch.in_tile]),
        scales,
        out,
        num_rows,
        out_features,
        in_features,
        part_features,
        QUANTISED=isinstance(x, QuantisedRows),
        BY_BLOCKS=scales.dim() == 2,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        ROWS_FIRST=has_rows_first(launch.row_tile, launch.out_tile),
        MAX_IMPRECISE=max_imprecise(x),
        ROWS_TOGETHER=_ROWS_TOGETHER,
        GROUP=FP8_BLOCK,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
