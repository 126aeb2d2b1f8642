"""Matrix products in Triton that give a row the same bits in every batch: x Wᵀ for any number of rows.

Every element of the result is one sum, begun at 0, to which the products of 16 input features at a time are added in
ascending order (the step of the matrix instruction for types of 2 bytes). No tile size shows in that, so that launches
may differ with the number of rows; the input features are never split over programs.

The programs stay on their multiprocessors and take tile after tile. Tiles that are computed at the same time share rows
and weights, which are then found in the L2 cache. The tensor memory accelerator fetches them and fills up what is
missing of the last tiles with zeros. The number of rows is an argument for which nothing is specialised.

Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    in_tile: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int


_ROWS_TOGETHER = 8
"""Tiles of rows that are taken in turn before the next features."""
_VERIFIED_CAPABILITY = (9, 0)
"""GPUs on which all launches were seen to give the same bits; others take one launch for all numbers of rows."""


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
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
        features = feature + tl.arange(0, OUT_TILE)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + features, mask=features < OUT_FEATURES, other=0.0)
            total += bias.to(tl.float32)[None, :]
        target = out_ptr + rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
        inside = (rows < num_rows)[:, None] & (features < OUT_FEATURES)[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def choose_launch(num_rows: int, out_features: int, x: Tensor) -> Launch:
    """Choose the launch for so many rows."""
    if x.element_size() > 2:  # float32 runs without tensor cores: for tests
        return Launch(32, 64, 32, 2, 4, 2)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) != _VERIFIED_CAPABILITY:
        return Launch(64, 64, 64, 3, 4, 2)
    if num_rows <= 64:
        return Launch(64, 32, 128, 4, 4, 2)
    if num_rows <= 128:
        return Launch(64, 64, 128, 4, 4, 2)
    if num_rows <= 512:
        return Launch(128, 64, 64, 4, 4, 2)
    return Launch(128, 256, 64, 3, 8, 1)


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
    num_tiles = triton.cdiv(num_rows, launch.row_tile) * triton.cdiv(out_features, launch.out_tile)
    num_programs = launch.programs_per_multiprocessor * _num_multiprocessors(x.device)
    _linear_kernel[(min(num_tiles, num_programs),)](
        TensorDescriptor.from_tensor(x, [launch.row_tile, launch.in_tile]),
        TensorDescriptor.from_tensor(weight, [launch.out_tile, launch.in_tile]),
        weight if bias is None else bias,
        out,
        num_rows,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        ROWS_TOGETHER=_ROWS_TOGETHER,
        HAS_BIAS=bias is not None,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
