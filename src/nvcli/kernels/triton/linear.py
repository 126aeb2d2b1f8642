"""Products of few rows with a small weight: the weight is read once, by as many programs as keep the memory busy.

Each program takes a strip of output features and, where there are too few strips to fill the GPU, a part of the input
features as well; the parts are added up by the norm that comes next. The gate and the up projection of an MLP are
multiplied side by side, so that the activation needs no launch and no trip through memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.activation import activate
from nvcli.kernels.triton.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div

_ROUTER_ROWS = 1024
"""The most rows of which a router's logits are computed in parts. Measured on an H200 (128 experts, H 2048) in
microseconds, in parts against cuBLAS: 2.7 against 4.9 for 1 row, 4.7 against 5.6 for 1,024 and 31 against 13 for
8,192."""


class _Launch(NamedTuple):
    """Tile sizes of a product."""

    out_tile: int
    in_tile: int
    num_parts: int
    num_stages: int
    num_warps: int


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (strip, row tile, part). OUT_FEATURES: of what is written; with GATED the weight has twice as many."""
    strip = tl.program_id(0)
    part = tl.program_id(2)
    rows = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    features = strip * OUT_TILE + tl.arange(0, OUT_TILE)
    inner = tl.arange(0, IN_TILE)
    PART: tl.constexpr = IN_FEATURES // NUM_PARTS
    inside = (rows < num_rows)[:, None]
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * IN_FEATURES + part * PART + inner[None, :]
    weight_ptrs = weight_ptr + features[:, None].to(tl.int64) * IN_FEATURES + part * PART + inner[None, :]
    await_kernel_before(DEPENDENT)
    total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    total_up = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    for start in tl.range(0, PART, IN_TILE, num_stages=NUM_STAGES):
        x = tl.load(x_ptrs + start, mask=inside, other=0.0)
        total = tl.dot(x, tl.load(weight_ptrs + start).T, total)
        if GATED:
            total_up = tl.dot(x, tl.load(weight_ptrs + OUT_FEATURES * IN_FEATURES + start).T, total_up)
    if GATED:
        # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
        gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        total = activate(gate, GELU) * total_up.to(out_ptr.dtype.element_ty).to(tl.float32)
    out_rows = part * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """See `nvcli.kernels.linear.linear`, without a bias."""
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    _launch(x, weight, out, _WHOLE, gated=False)
    return out


def takes_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_parts` serves these shapes and types, and a router's few features are not better left to
    cuBLAS."""
    num_features, in_features = weight.shape
    return x.shape[0] <= _ROUTER_ROWS and weight.element_size() == 2 and num_features % 32 == in_features % 512 == 0


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """See `nvcli.kernels.linear.linear_parts`. [P, T, out] float32."""
    launch = _parts_launch(weight.shape[1])
    out = torch.empty(launch.num_parts, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, out, launch, gated=False)
    return out


def gated_linear(x: Tensor, weight: Tensor, *, is_gelu: bool = False) -> Tensor:
    """See `nvcli.kernels.linear.gated_linear`."""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, _GATED, gated=True, is_gelu=is_gelu)
    return out


_WHOLE = _Launch(out_tile=32, in_tile=256, num_parts=1, num_stages=4, num_warps=4)
_GATED = _Launch(out_tile=32, in_tile=128, num_parts=1, num_stages=4, num_warps=4)


def _parts_launch(in_features: int) -> _Launch:
    """Parts of 512 features, as even as the tile allows (measured on an H200: 4 for 2048, 6 for 3072)."""
    num_parts = max(1, in_features // 512)
    while in_features % (num_parts * 128):
        num_parts -= 1
    return _Launch(out_tile=32, in_tile=128, num_parts=num_parts, num_stages=4, num_warps=4)


def _launch(x: Tensor, weight: Tensor, out: Tensor, launch: _Launch, *, gated: bool, is_gelu: bool = False) -> None:
    num_rows, in_features = x.shape
    assert x.is_contiguous()
    row_tile = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    out_features = out.shape[-1]
    grid = (out_features // launch.out_tile, ceil_div(num_rows, row_tile), launch.num_parts)
    _linear_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        ROW_TILE=row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        NUM_PARTS=launch.num_parts,
        GATED=gated,
        GELU=is_gelu,
        NUM_STAGES=launch.num_stages,
        **dependent(x.device),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
