"""Products of FP8 activations and FP8 weights with scales by blocks: x Wᵀ.

A program multiplies a tile of rows by a tile of features, 128 input features at a time, for which every row has one
scale and the features of the tile have another. FP8 units add up these 128 products; the sums are scaled and added up
in float32. Few rows take narrow tiles, so that enough programs read the weight; tiles that run at the same time share
rows and weights, which are then found in the L2 cache.

The number of rows is an argument for which nothing is specialised: no other number compiles anew, but for the size of
the tiles. Shapes: T rows, `in` and `out` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.weight_formats import FP8_BLOCK


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """At most 128, so that the features of a tile share their scales."""
    rows_together: int
    """Tiles of rows that are taken in turn before the next features."""
    num_stages: int
    num_warps: int


def choose_launch(num_rows: int) -> Launch:
    """The launch for so many rows. Not measured yet: the sizes follow those of the products of 16 bits."""
    if num_rows <= 64:
        return Launch(
            row_tile=16 if num_rows <= 16 else 32 if num_rows <= 32 else 64,
            out_tile=32,
            rows_together=1,
            num_stages=5,
            num_warps=4,
        )
    if num_rows <= 256:
        return Launch(row_tile=64, out_tile=64, rows_together=4, num_stages=4, num_warps=4)
    return Launch(row_tile=128, out_tile=128, rows_together=8, num_stages=4, num_warps=8)


@triton.jit(do_not_specialize=["num_rows"])
def _block_linear_kernel(
    x_ptr,  # [T, IN_FEATURES] e4m3
    x_scales_ptr,  # [T, G] float32
    weight_ptr,  # [OUT_FEATURES, IN_FEATURES] e4m3
    weight_scales_ptr,  # [OUT_FEATURES / 128, rounded up, G] float32
    out_ptr,  # [T, OUT_FEATURES], written
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (tile)."""
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    BAND: tl.constexpr = ROWS_TOGETHER * OUT_TILES
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    first = tile // BAND * ROWS_TOGETHER
    rows_together = tl.minimum(row_tiles - first, ROWS_TOGETHER)
    rows = (first + tile % BAND % rows_together) * ROW_TILE + tl.arange(0, ROW_TILE)
    first_feature = tile % BAND // rows_together * OUT_TILE
    features = first_feature + tl.arange(0, OUT_TILE)
    inner = tl.arange(0, GROUP)
    is_row, is_feature = rows < num_rows, features < OUT_FEATURES
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * IN_FEATURES + inner[None, :]
    weight_ptrs = weight_ptr + features[:, None].to(tl.int64) * IN_FEATURES + inner[None, :]
    x_scale_ptrs = x_scales_ptr + rows.to(tl.int64) * NUM_GROUPS
    weight_scale_ptr = weight_scales_ptr + first_feature // GROUP * NUM_GROUPS
    total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    for group in tl.range(0, NUM_GROUPS, num_stages=NUM_STAGES):
        start = group * GROUP
        if IN_FEATURES % GROUP == 0:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_feature[:, None], other=0.0)
        else:
            is_inside = (start + inner < IN_FEATURES)[None, :]
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_feature[:, None] & is_inside, other=0.0)
        scales = tl.load(x_scale_ptrs + group, mask=is_row, other=0.0) * tl.load(weight_scale_ptr + group)
        total += tl.dot(x, weight.T) * scales[:, None]
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_feature[None, :])


def block_linear(
    x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor | None = None, launch: Launch | None = None
) -> Tensor:
    """See `nvcli.kernels.fp8.fp8_linear`, for scales by blocks and without a bias. Without `launch` that of
    `choose_launch` is taken."""
    num_rows, in_features = x.codes.shape
    out_features = weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, out_features, dtype=x.dtype, device=weight.device)
    if launch is None:
        launch = choose_launch(num_rows)
    assert x.codes.is_contiguous()
    assert x.scales.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert out.is_contiguous()
    num_tiles = triton.cdiv(num_rows, launch.row_tile) * triton.cdiv(out_features, launch.out_tile)
    if num_tiles:
        _block_linear_kernel[(num_tiles,)](
            x.codes,
            x.scales,
            weight,
            scales,
            out,
            num_rows,
            OUT_FEATURES=out_features,
            IN_FEATURES=in_features,
            ROW_TILE=launch.row_tile,
            OUT_TILE=launch.out_tile,
            ROWS_TOGETHER=launch.rows_together,
            GROUP=FP8_BLOCK,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return out
