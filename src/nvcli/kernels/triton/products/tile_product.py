"""The product of a tile of rows and a tile of features, one tile of input features after the other. Products of linear
layers and of experts share it.

What a weight of each kind is made of:

    plain    numbers of the activations' type
    channel  e4m3, each row with a scale, which the whole sum is multiplied by
    block    e4m3, with a scale for 128 × 128 numbers, and of activations for 128 of a row, by which the sum of each 128
             products is multiplied
    integer  words of four codes (`kernels/w4.py`) with scales for groups of a row's codes
    affine   the same, with scales and offsets for groups, or words of two codes
    mxfp4    the same, with numbers of FP4 and scales that are powers of two; for activations in FP8 in another order,
             and each row with a factor, which the whole sum is multiplied by
    nvfp4    the same, with scales in e4m3, and with such factors

FP8 units keep about 14 bits of a sum. They add up the products of 128 input features, and these sums are added up in
float32: left to the units, 4,096 products of one sign lose 8 %, and of random signs 0.3 %. Activations without scales
are plain: FP8 codes are turned into numbers of their type, exactly, which serves GPUs without FP8 units. Codes of 4
bits become numbers in registers, from which Hopper's units take their first operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.products.operands import (
    dot,
    load_row_scales,
    per_feature,
    per_row,
    scaled_dot,
    zeros,
)
from nvcli.kernels.triton.products.w4_codes import NVFP4_UNIT, add_tile, first_words
from nvcli.kernels.weight_formats import FP8_BLOCK

_FP8_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def multiply_tile(
    x,  # by TMA a descriptor of tiles [row_tile, in_tile], else a pointer to [rows, in]
    row,  # the first row, by TMA
    rows,  # [ROW_TILE] int64
    is_row,  # [ROW_TILE]
    x_scales_ptr,  # quantised: [rows] float32, or for blocks [rows, groups]
    weight,  # by TMA a descriptor of tiles [out_tile, in_tile], else a pointer to [features, in], or to words
    first_row,  # the first row of the weight
    feature,  # the first feature, of those that have scales
    is_feature,  # [out_tile]
    scales_ptr,  # [features] or for blocks [blocks, groups], float32; for 4 bits [groups, features] int32
    out_features,  # how far a row of the gate and the one of the up projection are apart
    in_features,
    first_inner,  # the first input feature, a multiple of in_tile
    length,  # how many input features there are
    KIND: tl.constexpr,  # `TileKind`
):
    """Return the sums of a tile in float32, as `rows_first` says, and of a gated product those of the up projection."""
    MAX_IMPRECISE: tl.constexpr = _FP8_BLOCK if KIND.is_quantised else None
    IN_4_BITS: tl.constexpr = KIND.is_in_4_bits
    PART: tl.constexpr = KIND.in_tile // (KIND.parts if IN_4_BITS else 4)  # words of a tile
    row_size = tl.cdiv(in_features, KIND.in_tile) * PART if IN_4_BITS else in_features
    scales_stride = out_features * 2 if KIND.is_gated else out_features
    features = feature + tl.arange(0, KIND.out_tile)
    x_at, weight_at, up_at = x, weight, weight
    if IN_4_BITS:
        inner = tl.arange(0, PART)
        x_at = x + rows[None, :] * in_features + inner[:, None]
    else:
        inner = tl.arange(0, KIND.in_tile)
        if not KIND.x_by_tma:
            x_at = x + rows[:, None] * in_features + inner[None, :]
    if not KIND.weight_by_tma:
        first_rows = first_row + tl.arange(0, KIND.out_tile)
        if IN_4_BITS:  # `out_features` is a multiple of `row_block`
            weight_at = weight + first_words(first_rows, row_size, KIND.row_block, PART)
        else:
            weight_at = weight + first_rows[:, None].to(tl.int64) * row_size + inner[None, :]
        up_at = weight_at + tl.cast(out_features, tl.int64) * row_size
    if KIND.weight == "block":
        num_groups = tl.cdiv(in_features, KIND.group)
        x_scale_ptrs = x_scales_ptr + rows * num_groups
        scale_ptr = scales_ptr + feature // KIND.group * num_groups
        up_scale_ptr = scale_ptr + out_features // KIND.group * num_groups
    total = zeros(KIND.row_tile, KIND.out_tile, KIND.rows_first)
    up = zeros(KIND.row_tile, KIND.out_tile, KIND.rows_first)
    for inner_start in tl.range(0, length, KIND.in_tile, num_stages=KIND.num_stages):
        start = first_inner + inner_start
        if IN_4_BITS:
            total = add_tile(
                total, weight_at, scales_ptr + features, x_at, start // KIND.in_tile, is_row, is_feature, scales_stride,
                in_features, KIND,
            )  # fmt: skip
            if KIND.is_gated:
                up = add_tile(
                    up, up_at, scales_ptr + out_features + features, x_at, start // KIND.in_tile, is_row, is_feature,
                    scales_stride, in_features, KIND,
                )  # fmt: skip
        else:
            x_tile = _load_tile(x_at, row, is_row, start, in_features, KIND, KIND.x_by_tma)
            numbers = _load_tile(weight_at, first_row, is_feature, start, in_features, KIND, KIND.weight_by_tma)
            if KIND.is_gated:
                up_row = first_row + out_features
                of_up = _load_tile(up_at, up_row, is_feature, start, in_features, KIND, KIND.weight_by_tma)
            if KIND.weight == "block":
                group = start // KIND.group
                row_scales = load_row_scales(x_scale_ptrs + group, is_row, KIND.is_quantised)
                total = scaled_dot(x_tile, numbers, row_scales * tl.load(scale_ptr + group), total, KIND.rows_first)
                if KIND.is_gated:
                    up = scaled_dot(x_tile, of_up, row_scales * tl.load(up_scale_ptr + group), up, KIND.rows_first)
            else:
                total = dot(x_tile, numbers, total, KIND.rows_first, MAX_IMPRECISE)
                if KIND.is_gated:
                    up = dot(x_tile, of_up, up, KIND.rows_first, MAX_IMPRECISE)
    if KIND.has_row_factors:
        row_scales = per_row(load_row_scales(x_scales_ptr + rows, is_row, KIND.is_quantised), KIND.rows_first)
        if KIND.weight == "nvfp4":
            row_scales *= NVFP4_UNIT
        factor_ptrs = scales_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + features
        total *= row_scales * load_features(factor_ptrs, is_feature, KIND.rows_first)
        if KIND.is_gated:
            up *= row_scales * load_features(factor_ptrs + out_features, is_feature, KIND.rows_first)
    return total, up


@triton.jit
def load_features(pointers, is_feature, ROWS_FIRST: tl.constexpr):
    """Load a number of each feature, in float32 and the shape that a tile of a result takes."""
    return per_feature(tl.load(pointers, mask=is_feature, other=0.0).to(tl.float32), ROWS_FIRST)


@triton.jit
def _load_tile(matrix, row, is_row, start, in_features, KIND: tl.constexpr, BY_TMA: tl.constexpr):
    """Load a tile [rows, in_tile] of a matrix from input feature `start` on: by its descriptor, from `row` on, or by
    pointers to the rows' first tile."""
    if BY_TMA:
        tile = matrix.load([row, start])
    else:
        inside = is_row[:, None]
        if not KIND.is_whole:
            inside = inside & (start + tl.arange(0, KIND.in_tile) < in_features)[None, :]
        tile = tl.load(matrix + start, mask=inside, other=0.0)
    return tile
