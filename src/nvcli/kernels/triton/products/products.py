"""Products of linear layers, x Wᵀ: one kernel for weights of 16 bits, in FP8 and of 4 bits (`tile_product.py`).

A program multiplies a tile of rows by a tile of features, or by a part of the input features where the norm behind the
product adds up the parts: a product of few rows is as fast as its weight is read, by as many programs as keep the
memory busy. The gate and the up projection of an MLP are multiplied side by side, so that the activation needs no
launch and no trip through memory. With many rows programs may stay on their multiprocessors and take tile after tile.
Tiles that are computed at the same time share rows and weights, which are then found in the L2 cache.

Each sum begins at 0, and products are added to it in the order of the input features, those of one instruction at a
time. So no tile size shows in a result, nor does the number of rows, as long as the same operand comes first and one
program takes all input features.

TMA fetches tiles and fills up what is missing with zeros, but it is slow at tiles that lack most of their rows.
Descriptors travel as arguments, so a launch may be captured in a CUDA graph. No number of rows is a constant of the
kernel, nor of features unless the launch says so: it is compiled once for all shapes.

Shapes: T rows, `in` and `out` features, G = in / 128, rounded up, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.activation import Activation
from nvcli.kernels.expert_types import weight_kind
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.elementwise.activation import activate
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.operands import TileKind, codes_for, has_rows_first, per_feature, per_row
from nvcli.kernels.triton.products.product_launch import ProductLaunch
from nvcli.kernels.triton.products.tile_product import load_features, multiply_tile
from nvcli.kernels.weight_formats import FP8_BLOCK, W4Format
from nvcli.kernels.whole_numbers import ceil_div


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,  # [T, in], quantised in e4m3; by TMA a descriptor of tiles [row_tile, in_tile]
    x_scales_ptr,  # quantised: [T] float32, or for blocks [T, G]
    weight,  # [out, in], gated [2 out, in]; by TMA a descriptor of tiles [out_tile, in_tile]
    scales_ptr,  # [out] float32; for blocks [out / 128, rounded up, G]; in 4 bits [groups, out or 2 out] int32
    bias_ptr,  # None, or [out]
    out_ptr,  # [P, T, out], written
    num_rows,
    out_features,
    in_features,
    part_features,  # of every part but the last, a multiple of in_tile
    KIND: tl.constexpr,  # `TileKind`
    GELU: tl.constexpr,
    IS_EVEN: tl.constexpr,  # all parts have `part_features`
    HAS_WHOLE_STRIPS: tl.constexpr,  # the last tile of features is full
    IS_PERSISTENT: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile of rows, tile of features, part), or with ROWS_TOGETHER (tile, 0, part), IS_PERSISTENT the first of
    its tiles."""
    ROW_TILE: tl.constexpr = KIND.row_tile
    OUT_TILE: tl.constexpr = KIND.out_tile
    ROWS_FIRST: tl.constexpr = KIND.rows_first
    await_kernel_before(DEPENDENT)
    part = tl.program_id(2)
    first_inner = part * part_features
    length = part_features if IS_EVEN else tl.minimum(part_features, in_features - first_inner)
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    out_tiles = tl.cdiv(out_features, OUT_TILE)
    begin, end, step = 0, 1, 1
    if IS_PERSISTENT:
        begin, end, step = tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0)
    for item in tl.range(begin, end, step):
        if ROWS_TOGETHER > 0:
            tile = item if IS_PERSISTENT else tl.program_id(0)
            band = ROWS_TOGETHER * out_tiles
            first = tile // band * ROWS_TOGETHER
            rows_together = tl.minimum(row_tiles - first, ROWS_TOGETHER)
            row = (first + tile % band % rows_together) * ROW_TILE
            feature = tile % band // rows_together * OUT_TILE
        else:
            row = tl.program_id(0) * ROW_TILE
            feature = tl.program_id(1) * OUT_TILE
        rows = row + tl.arange(0, ROW_TILE)
        features = feature + tl.arange(0, OUT_TILE)
        is_row = rows < num_rows
        is_feature = tl.full([OUT_TILE], True, tl.int1) if HAS_WHOLE_STRIPS else features < out_features
        total, up = multiply_tile(
            x, row, rows.to(tl.int64), is_row, x_scales_ptr, weight, feature, feature, is_feature, scales_ptr,
            out_features, in_features, first_inner, length, KIND,
        )  # fmt: skip
        if bias_ptr is not None:
            total += load_features(bias_ptr + features, is_feature, ROWS_FIRST)
            if KIND.is_gated:
                up += load_features(bias_ptr + out_features + features, is_feature, ROWS_FIRST)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if KIND.is_gated:
            # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
            total = activate(total.to(dtype).to(tl.float32), GELU) * up.to(dtype).to(tl.float32)
        out_rows = part.to(tl.int64) * num_rows + rows
        out_ptrs = out_ptr + per_row(out_rows, ROWS_FIRST) * out_features + per_feature(features, ROWS_FIRST)
        inside = per_row(is_row, ROWS_FIRST) & per_feature(is_feature, ROWS_FIRST)
        tl.store(out_ptrs, total.to(dtype), mask=inside)


def multiply(
    x: Activations,
    weight: Tensor,
    launch: ProductLaunch,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    format: W4Format | None = None,
    bias: Tensor | None = None,
    gate: Activation | None = None,
    in_parts: bool = False,
) -> Tensor:
    """x Wᵀ + b, or with a gate activation(x Gᵀ) × (x Uᵀ) for a weight that holds G above U.

    x: [T, in]; weight: [out, in] or [2 × out, in], contiguous, rows of both at multiples of 16 bytes; or of 4 bits with
    its format, words → [T, out] in `out` (contiguous) if that is given, or else of the type of the activations; or
    `in_parts` [P, T, out] float32.
    """
    num_rows, in_features = x.shape
    numbers, row_scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x.contiguous(), scales)
    out_features = len(weight) if gate is None else len(weight) // 2
    if in_parts:
        assert out is None
        out = torch.empty(launch.num_parts, num_rows, out_features, dtype=torch.float32, device=weight.device)
    elif out is None:
        out = torch.empty(num_rows, out_features, dtype=x.dtype, device=weight.device)
    assert in_parts or launch.num_parts == 1
    assert format is None or out_features % format.row_block == 0
    for tensor in (numbers, row_scales, weight, scales, out):
        assert tensor is None or tensor.is_contiguous()
    if num_rows == 0:
        return out
    kind = _tile_kind(x, scales, format, launch, gate)
    if kind.weight == "channel" or kind.weight == "block":
        weight = codes_for(x, weight)
    row_tiles, out_tiles = ceil_div(num_rows, launch.row_tile), ceil_div(out_features, launch.out_tile)
    programs = launch.num_programs * num_multiprocessors(weight.device) or row_tiles * out_tiles
    grid = (min(row_tiles * out_tiles, programs), 1) if launch.rows_together else (row_tiles, out_tiles)
    assert launch.rows_together or not launch.num_programs
    part_features = ceil_div(ceil_div(in_features, launch.in_tile), launch.num_parts) * launch.in_tile
    sizes: tuple[Any, ...] = (out_features, in_features, part_features)
    if launch.has_constants and numbers.is_cuda:  # which the interpreter does not know
        sizes = tuple(map(tl.constexpr, sizes))
    product_kernel[(*grid, launch.num_parts)](
        TensorDescriptor.from_tensor(numbers, [launch.row_tile, launch.in_tile]) if kind.x_by_tma else numbers,
        row_scales,
        TensorDescriptor.from_tensor(weight, [launch.out_tile, launch.in_tile]) if kind.weight_by_tma else weight,
        scales,
        bias,
        out,
        num_rows,
        *sizes,
        KIND=kind,
        GELU=gate == "gelu_tanh",
        IS_EVEN=in_features == part_features * launch.num_parts,
        HAS_WHOLE_STRIPS=out_features % launch.out_tile == 0,
        IS_PERSISTENT=launch.num_programs > 0,
        ROWS_TOGETHER=launch.rows_together,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **dependent(weight.device),
    )
    return out


def _tile_kind(
    x: Activations, scales: Tensor | None, format: W4Format | None, launch: ProductLaunch, gate: Activation | None
) -> TileKind:
    """Return the constants of a product. Rows always come first where results must not depend on their number."""
    weight = weight_kind(None if scales is None else scales.dim(), format)
    x_by_tma, weight_by_tma = format is None and launch.x_by_tma, format is None and launch.weight_by_tma
    return TileKind(
        weight=weight,
        group=FP8_BLOCK if format is None else format.group,
        row_block=1 if format is None else format.row_block,
        is_quantised=isinstance(x, QuantisedRows),
        is_gated=gate is not None,
        row_tile=launch.row_tile,
        out_tile=launch.out_tile,
        in_tile=launch.in_tile,
        rows_first=weight == "plain" or (format is None and has_rows_first(launch.row_tile, launch.out_tile)),
        x_by_tma=x_by_tma,
        weight_by_tma=weight_by_tma,
        is_whole=(x_by_tma and weight_by_tma) or x.shape[1] % launch.in_tile == 0,
        is_packed=(x.codes if isinstance(x, QuantisedRows) else x).is_cuda,
        num_stages=launch.num_stages,
    )
