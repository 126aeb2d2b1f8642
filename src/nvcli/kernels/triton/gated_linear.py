"""The gate and up projection of an MLP with its activation, for many rows on Hopper: silu(x Gᵀ) × (x Uᵀ) in one kernel.

cuBLAS would write both products to memory, and another kernel would read them. Here a program multiplies a tile of rows
by as many features of G as of U, side by side, and writes only the activation's result, half as much as both products.
The programs stay on their multiprocessors and take tile after tile. Tiles that are computed at the same time share rows
and weights, which are then found in the L2 cache. The tensor memory accelerator fetches them and fills up missing rows.

Descriptors are made on the host and travel as arguments of the launch, so a call may be captured in a CUDA graph. The
number of rows is an argument, too, for which nothing is specialised: no other number compiles anew.

The order of the tiles is that of Triton's tutorial on matrix products. Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.triton.activation import activate
from nvcli.kernels.triton.multiprocessors import num_multiprocessors
from nvcli.kernels.whole_numbers import ceil_div


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """Features of the result; as many of G and of U are multiplied."""
    in_tile: int
    rows_together: int
    """Tiles of rows that are taken in turn before the next features."""
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int


_FEW_FEATURES = 2048
_ROWS_TOGETHER_FOR_FEW = 8
"""With fewer than _FEW_FEATURES input features. Qwen3-0.6B's layer (1,024 features) takes 188 us for 8,192 rows on an
H200 under sustained load; cuBLAS and the activation take 204."""
_ROWS_TOGETHER_FOR_MANY = 16
"""Qwen3-8B's layer (4,096 features) takes 2,565 us for 8,192 rows; cuBLAS and the activation take 2,625. With 4 tiles
of rows together the kernel takes 2,677."""


def choose_launch(in_features: int) -> Launch:
    """The fastest launch of those measured on an H200, for weights of so many input features."""
    return Launch(
        row_tile=128,
        out_tile=128,
        in_tile=64,
        rows_together=_ROWS_TOGETHER_FOR_FEW if in_features < _FEW_FEATURES else _ROWS_TOGETHER_FOR_MANY,
        num_stages=4,
        num_warps=8,
        programs_per_multiprocessor=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear_kernel(
    x,  # descriptor of [T, in], tiles [ROW_TILE, IN_TILE]
    weight,  # descriptor of [2 out, in], tiles [OUT_TILE, IN_TILE]
    out,  # [T, out], contiguous
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    GELU: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program i takes tiles i, i + number of programs and so on."""
    OUT_TILES: tl.constexpr = OUT_FEATURES // OUT_TILE
    BAND: tl.constexpr = ROWS_TOGETHER * OUT_TILES
    row_tiles = tl.cdiv(num_rows, ROW_TILE)
    for tile in tl.range(tl.program_id(0), row_tiles * OUT_TILES, tl.num_programs(0)):
        first = tile // BAND * ROWS_TOGETHER
        rows_together = tl.minimum(row_tiles - first, ROWS_TOGETHER)
        row = (first + tile % BAND % rows_together) * ROW_TILE
        feature = tile % BAND // rows_together * OUT_TILE
        gate = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
        up = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
        for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
            x_tile = x.load([row, start])
            gate = tl.dot(x_tile, weight.load([feature, start]).T, gate)
            up = tl.dot(x_tile, weight.load([OUT_FEATURES + feature, start]).T, up)
        # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
        dtype: tl.constexpr = out.dtype.element_ty
        gate = gate.to(dtype).to(tl.float32)
        product = activate(gate, GELU) * up.to(dtype).to(tl.float32)
        rows = row + tl.arange(0, ROW_TILE)
        features = feature + tl.arange(0, OUT_TILE)
        target = out + rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
        tl.store(target, product.to(dtype), mask=(rows < num_rows)[:, None])


def gated_linear(x: Tensor, weight: Tensor, launch: Launch | None = None, *, is_gelu: bool = False) -> Tensor:
    """See `nvcli.kernels.linear.gated_linear`. x, weight: contiguous; `in` and `out` are multiples of the tile's
    features, and rows of both tensors begin at multiples of 16 bytes. Without `launch` the measured one is taken."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // 2
    if launch is None:
        launch = choose_launch(in_features)
    assert out_features % launch.out_tile == 0
    assert in_features % launch.in_tile == 0
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    num_tiles = ceil_div(num_rows, launch.row_tile) * (out_features // launch.out_tile)
    num_programs = launch.programs_per_multiprocessor * num_multiprocessors(x.device)
    _gated_linear_kernel[(min(num_tiles, num_programs),)](
        TensorDescriptor.from_tensor(x, [launch.row_tile, launch.in_tile]),
        TensorDescriptor.from_tensor(weight, [launch.out_tile, launch.in_tile]),
        out,
        num_rows,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        ROWS_TOGETHER=launch.rows_together,
        GELU=is_gelu,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out
