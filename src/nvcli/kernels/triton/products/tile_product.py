"""The product of a tile of rows and a tile of features, one tile of input features after the other. Products of linear
layers and of experts share it.

What a weight of each kind is made of:

    plain    numbers of the activations' type
    channel  e4m3, each row with a scale, which the whole sum is multiplied by
    block    e4m3, with a scale for 128 × 128 numbers, and of activations for 128 of a row, by which the sum of each 128
             products is multiplied
    integer  words of four codes (`kernels/w4.py`) with scales for groups of a row's codes
    mxfp4    the same, with numbers of FP4 and scales that are powers of two
    nvfp4    the same, with scales in e4m3, and each row with a factor, which the whole sum is multiplied by

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
    load_rows,
    per_feature,
    per_row,
    scaled_dot,
    zeros,
)
from nvcli.kernels.triton.products.w4_codes import add_tile, row_factors
from nvcli.kernels.weight_formats import FP8_BLOCK

_FP8_BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def multiply_tile(
    x,  # X_BY_TMA a descriptor of tiles [ROW_TILE, IN_TILE], else a pointer to [rows, in]
    row,  # the first row, with X_BY_TMA
    rows,  # [ROW_TILE] int64
    is_row,  # [ROW_TILE]
    x_scales_ptr,  # QUANTISED: [rows] float32, or for blocks [rows, groups]
    weight,  # WEIGHT_BY_TMA a descriptor of tiles [OUT_TILE, IN_TILE], else a pointer to [features, in], or to words
    first_row,  # the first row of the weight
    feature,  # the first feature, of those that have scales
    is_feature,  # [OUT_TILE]
    scales_ptr,  # [features] or for blocks [blocks, groups], float32; for 4 bits [groups, features] int32
    out_features,  # how far a row of the gate and the one of the up projection are apart
    in_features,
    first_inner,  # the first input feature, a multiple of IN_TILE
    length,  # how many input features there are
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTISED: tl.constexpr,
    GATED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    X_BY_TMA: tl.constexpr,
    WEIGHT_BY_TMA: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # the last tile of input features is full, or TMA fills it up
    PACKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the sums of a tile in float32, as ROWS_FIRST says, and GATED those of the up projection."""
    MAX_IMPRECISE: tl.constexpr = _FP8_BLOCK if QUANTISED else None
    IN_4_BITS: tl.constexpr = KIND == "integer" or KIND == "mxfp4" or KIND == "nvfp4"
    PART: tl.constexpr = IN_TILE // 4  # codes of a word
    row_size = tl.cdiv(in_features, IN_TILE) * PART if IN_4_BITS else in_features
    scales_stride = out_features * 2 if GATED else out_features
    features = feature + tl.arange(0, OUT_TILE)
    x_at, weight_at, up_at = x, weight, weight
    if IN_4_BITS:
        inner = tl.arange(0, PART)
        x_at = x + rows[None, :] * in_features + inner[:, None]
    else:
        inner = tl.arange(0, IN_TILE)
        if not X_BY_TMA:
            x_at = x + rows[:, None] * in_features + inner[None, :]
    if not WEIGHT_BY_TMA:
        first_rows = first_row + tl.arange(0, OUT_TILE)
        weight_at = weight + first_rows[:, None].to(tl.int64) * row_size + inner[None, :]
        up_at = weight_at + tl.cast(out_features, tl.int64) * row_size
    if KIND == "block":
        num_groups = tl.cdiv(in_features, GROUP)
        x_scale_ptrs = x_scales_ptr + rows * num_groups
        scale_ptr = scales_ptr + feature // GROUP * num_groups
        up_scale_ptr = scale_ptr + out_features // GROUP * num_groups
    total = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    up = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    for inner_start in tl.range(0, length, IN_TILE, num_stages=NUM_STAGES):
        start = first_inner + inner_start
        if IN_4_BITS:
            total = add_tile(
                total, weight_at, scales_ptr + features, x_at, start // IN_TILE, is_row, is_feature, scales_stride,
                in_features, KIND, GROUP, PART, PACKED, IS_WHOLE,
            )  # fmt: skip
            if GATED:
                up = add_tile(
                    up, up_at, scales_ptr + out_features + features, x_at, start // IN_TILE, is_row, is_feature,
                    scales_stride, in_features, KIND, GROUP, PART, PACKED, IS_WHOLE,
                )  # fmt: skip
        else:
            x_tile = _load_tile(x_at, row, is_row, start, in_features, IN_TILE, X_BY_TMA, IS_WHOLE)
            numbers = _load_tile(weight_at, first_row, is_feature, start, in_features, IN_TILE, WEIGHT_BY_TMA, IS_WHOLE)
            if GATED:
                up_row = first_row + out_features
                of_up = _load_tile(up_at, up_row, is_feature, start, in_features, IN_TILE, WEIGHT_BY_TMA, IS_WHOLE)
            if KIND == "block":
                group = start // GROUP
                row_scales = load_row_scales(x_scale_ptrs + group, is_row, QUANTISED)
                total = scaled_dot(x_tile, numbers, row_scales * tl.load(scale_ptr + group), total, ROWS_FIRST)
                if GATED:
                    up = scaled_dot(x_tile, of_up, row_scales * tl.load(up_scale_ptr + group), up, ROWS_FIRST)
            else:
                total = dot(x_tile, numbers, total, ROWS_FIRST, MAX_IMPRECISE)
                if GATED:
                    up = dot(x_tile, of_up, up, ROWS_FIRST, MAX_IMPRECISE)
    if KIND == "channel":
        row_scales = per_row(load_row_scales(x_scales_ptr + rows, is_row, QUANTISED), ROWS_FIRST)
        scale_ptrs = scales_ptr + features
        total *= row_scales * load_features(scale_ptrs, is_feature, ROWS_FIRST)
        if GATED:
            up *= row_scales * load_features(scale_ptrs + out_features, is_feature, ROWS_FIRST)
    if KIND == "nvfp4":
        total *= row_factors(scales_ptr, features, is_feature)[:, None]
        if GATED:
            up *= row_factors(scales_ptr, out_features + features, is_feature)[:, None]
    return total, up


@triton.jit
def load_features(pointers, is_feature, ROWS_FIRST: tl.constexpr):
    """Load a number of each feature, in float32 and the shape that a tile of a result takes."""
    return per_feature(tl.load(pointers, mask=is_feature, other=0.0).to(tl.float32), ROWS_FIRST)


@triton.jit
def _load_tile(
    matrix, row, is_row, start, in_features, IN_TILE: tl.constexpr, BY_TMA: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Load a tile of a matrix: of a descriptor, from `row` and input feature `start` on; or of pointers to its rows."""
    return matrix.load([row, start]) if BY_TMA else load_rows(matrix, is_row, start, in_features, IN_TILE, IS_WHOLE)
