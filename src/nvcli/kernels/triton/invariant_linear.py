"""Matrix products in Triton that give a row the same bits in every batch: x Wᵀ for any number of rows.

Every element of the result is one sum, begun at 0, to which the products of 16 input features at a time are added in
ascending order (the step of the matrix instructions for types of 2 bytes). No tile size shows in that, so launches may
differ with the number of rows, and the instructions for few rows and for many give the same bits (seen on an H200);
the input features are never split over programs.

There are two kernels. With few rows the weight is what is read, once, by a program for each strip of output features.
With more rows the programs stay on their multiprocessors and take tile after tile; tiles that are computed at the same
time share rows and weights, which are then found in the L2 cache. The tensor memory accelerator fetches tiles and fills
up what is missing of the last ones with zeros. The number of rows is an argument for which nothing is specialised.

Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.triton.multiprocessors import num_multiprocessors
from nvcli.kernels.whole_numbers import ceil_div


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    in_tile: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int = 1


_FEW_ROWS = 64
"""Up to so many rows, one tile holds them all. The accelerator is slow at tiles that lack most of their rows
(Qwen3-8B's down projection on an H200: 58 us for 16 rows, and 38 us for 64), so these are read by pointers."""
_ROWS_TOGETHER = 8
"""Tiles of rows that are taken in turn before the next features."""
_FEATURES_TOGETHER = 16
"""Input features whose products one instruction adds up, of types of 2 bytes."""
_VERIFIED_CAPABILITY = (9, 0)
"""GPUs on which all launches were seen to give the same bits; others take one launch for all numbers of rows."""


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,  # [T, in], contiguous
    weight,  # descriptor of [out, in], tiles [OUT_TILE, IN_TILE]
    bias_ptr,  # [out], with HAS_BIAS
    out_ptr,  # [T, out], contiguous, written
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of OUT_TILE features, tile of rows)."""
    feature = tl.program_id(0) * OUT_TILE
    rows = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    inner = tl.arange(0, IN_TILE)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * IN_FEATURES + inner[None, :]
    has_row = (rows < num_rows)[:, None]
    total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
        if IN_FEATURES % IN_TILE == 0:
            x = tl.load(x_ptrs + start, mask=has_row, other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=has_row & (start + inner < IN_FEATURES)[None, :], other=0.0)
        total = tl.dot(x, weight.load([feature, start]).T, total, input_precision="ieee")
    _store(total, bias_ptr, out_ptr, rows, feature + tl.arange(0, OUT_TILE), num_rows, OUT_FEATURES, HAS_BIAS)


@triton.jit
def _store(total, bias_ptr, out_ptr, rows, features, num_rows, OUT_FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store a tile [rows, features] of the result, with its bias."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + features, mask=features < OUT_FEATURES, other=0.0)
        total += bias.to(tl.float32)[None, :]
    target = out_ptr + rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    inside = (rows < num_rows)[:, None] & (features < OUT_FEATURES)[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _many_rows_kernel(
    x,  # descriptor of [T, in], tiles [ROW_TILE, IN_TILE]
    weight,  # descriptor of [out, in], tiles [OUT_TILE, IN_TILE]
    bias_ptr,  # [out], with HAS_BIAS
    out_ptr,  # [T, out], contiguous, written
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program i takes tiles i, i + number of programs and so on."""
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    BAND: tl.constexpr = ROWS_TOGETHER * OUT_TILES
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    for tile in tl.range(tl.program_id(0), row_tiles * OUT_TILES, tl.num_programs(0)):
        first = tile // BAND * ROWS_TOGETHER
        rows_together = tl.minimum(row_tiles - first, ROWS_TOGETHER)
        row = (first + tile % BAND % rows_together) * ROW_TILE
        feature = tile % BAND // rows_together * OUT_TILE
        total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
        for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
            total = tl.dot(x.load([row, start]), weight.load([feature, start]).T, total, input_precision="ieee")
        rows = row + tl.arange(0, ROW_TILE)
        _store(total, bias_ptr, out_ptr, rows, feature + tl.arange(0, OUT_TILE), num_rows, OUT_FEATURES, HAS_BIAS)


def choose_launch(num_rows: int, out_features: int, x: Tensor) -> Launch:
    """Choose the launch for so many rows. With up to _FEW_ROWS rows a launch is of the kernel for few rows.

    Where one tile held all input features, Triton would take the bias as the sum's beginning, which gives other bits:
    tiles are narrower than that, down to the 16 features of an instruction, which no launch can divide.
    """
    launch = _measured_launch(num_rows, out_features, x)
    in_tile = launch.in_tile
    while in_tile >= x.shape[1] and in_tile > _FEATURES_TOGETHER:
        in_tile //= 2
    return launch._replace(in_tile=in_tile)


def _measured_launch(num_rows: int, out_features: int, x: Tensor) -> Launch:
    """Choose the launch that was fastest for so many rows of many features."""
    if x.element_size() > 2:  # float32 runs without tensor cores: for tests
        return Launch(16, 64, 32, 2, 4)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) != _VERIFIED_CAPABILITY:
        return Launch(64, 64, 64, 3, 4)
    if num_rows <= _FEW_ROWS:
        row_tile = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        if out_features <= _NARROW:
            return Launch(row_tile, 32, 256 if row_tile < 64 else 128, 4, 4)
        return Launch(row_tile, 64, 128, 4, 4)
    if num_rows <= 128:
        return Launch(128, 32 if out_features <= _NARROW else 64, 128, 4, 4)
    if num_rows <= 256:
        return Launch(128, 64, 128, 4, 8) if out_features <= _NARROW else Launch(128, 128, 64, 6, 8)
    if num_rows <= 512:
        return Launch(128, 128, 64, 6, 8)
    return Launch(128, 256, 64, 4, 8)


_NARROW = 4096
"""Up to so many output features, strips are cut so narrow that all multiprocessors have one."""


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, launch: Launch | None = None) -> None:
    """See `nvcli.kernels.invariant_linear.invariant_linear`. x, weight, out: contiguous; rows of the first two begin at
    multiples of 16 bytes. Without `launch` the measured one is taken."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    if num_rows == 0:
        return
    launch = launch or choose_launch(num_rows, out_features, x)
    row_tiles, out_tiles = ceil_div(num_rows, launch.row_tile), ceil_div(out_features, launch.out_tile)
    weight_tiles = TensorDescriptor.from_tensor(weight, [launch.out_tile, launch.in_tile])
    tiles = {
        "OUT_FEATURES": out_features,
        "IN_FEATURES": in_features,
        "ROW_TILE": launch.row_tile,
        "OUT_TILE": launch.out_tile,
        "IN_TILE": launch.in_tile,
        "HAS_BIAS": bias is not None,
        "NUM_STAGES": launch.num_stages,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
    bias = weight if bias is None else bias
    if num_rows <= _FEW_ROWS:
        _few_rows_kernel[(out_tiles, row_tiles)](x, weight_tiles, bias, out, num_rows, **tiles)
        return
    num_programs = launch.programs_per_multiprocessor * num_multiprocessors(x.device)
    _many_rows_kernel[(min(row_tiles * out_tiles, num_programs),)](
        TensorDescriptor.from_tensor(x, [launch.row_tile, launch.in_tile]),
        weight_tiles,
        bias,
        out,
        num_rows,
        ROWS_TOGETHER=_ROWS_TOGETHER,
        **tiles,
    )
