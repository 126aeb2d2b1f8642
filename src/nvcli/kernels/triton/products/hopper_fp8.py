"""The launches of the products of many rows with FP8 weights on Hopper GPUs (`hopper_fp8_kernel.py`).

Shapes: T rows, `in` and `out` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.elementwise.fp8 import share_scales
from nvcli.kernels.triton.launch.descriptors import TILE_BYTES, describe, describe_kept
from nvcli.kernels.triton.launch.kept_kernel import KeptKernel
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.hopper_fp8_kernel import BLOCK, ROWS, hopper_fp8_kernel
from nvcli.kernels.triton.products.product_launch import HopperFP8Launch
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK: int = BLOCK.value
_ROWS: int = ROWS.value
_MOST_STAGES = 6
_BAND_ROWS = 2048
"""Rows of a band: programs work on the tiles of one band at a time."""


def num_stages(launch: HopperFP8Launch) -> int:
    """Count the stages that fit in shared memory beside each group's block of the result in 16 bits."""
    of_result = launch.groups * _ROWS * _BLOCK * 2
    of_stage = (launch.groups * _ROWS + launch.blocks * _BLOCK) * _BLOCK
    return min(_MOST_STAGES, (TILE_BYTES - of_result) // of_stage)


def linear(
    x: QuantisedRows, weight: Tensor, scales: Tensor, launch: HopperFP8Launch, out: Tensor | None = None
) -> Tensor:
    """x Wᵀ of at least one row: [T, in] → [T, out] of 16 bits, in `out` (contiguous) if that is given. `in` and `out`
    are multiples of 16. Both factors have scales by rows; or both by blocks, with one block in the launch (there are no
    registers for two) and one tile in a unit."""
    if out is None:
        out = torch.empty(len(x.codes), len(weight), dtype=x.dtype, device=weight.device)
    _launch(x, weight, scales, launch, out, ceil_div(len(weight), launch.blocks * _BLOCK))
    return out


def gated_linear(
    x: QuantisedRows, weight: Tensor, scales: Tensor, launch: HopperFP8Launch, *, is_gelu: bool = False
) -> QuantisedRows:
    """activation(x Wgᵀ) × (x Wuᵀ) of at least one row, quantised by rows, with scales that are powers of two. weight:
    [2 out, in], `out` a multiple of 128 → [T, out]. Both factors have scales by rows, and the launch has two blocks."""
    assert launch.blocks == 2
    assert scales.dim() == 1
    num_rows, out_features = len(x.codes), len(weight) // 2
    assert out_features % _BLOCK == 0
    strips = out_features // _BLOCK
    codes = torch.empty(num_rows, out_features, dtype=FP8, device=weight.device)
    exponents = torch.empty(num_rows, strips, dtype=torch.uint8, device=weight.device)
    _launch(x, weight, scales, launch, codes, strips, exponents=exponents, is_gelu=is_gelu)
    return QuantisedRows(codes, share_scales(codes, exponents), x.dtype)


def _launch(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    launch: HopperFP8Launch,
    out: Tensor,
    strips: int,
    *,
    exponents: Tensor | None = None,
    is_gelu: bool = False,
) -> None:
    """Launch the kernel; `exponents` are those of a gated product."""
    by_blocks, unit_tiles = scales.dim() == 2, launch.unit_tiles or 1
    assert x.scales.dim() == scales.dim()
    assert not by_blocks or (launch.blocks, launch.unit_tiles) == (1, 1)
    for tensor in (x.codes, x.scales, weight, scales, out):
        assert tensor.is_contiguous()
    num_rows, in_features = x.shape
    row_tile = launch.groups * _ROWS
    num_tiles = ceil_div(num_rows, row_tile) * strips
    kernel = _kernel(
        x.codes.device,
        out.dtype,
        scales.data_ptr() % 16,
        launch.groups,
        launch.blocks,
        num_stages(launch),
        by_blocks,
        exponents is not None,
        is_gelu,
        launch.unit_tiles,
    )
    kernel.launch(
        min(num_tiles, num_multiprocessors(x.codes.device)),
        describe(x.codes, (_ROWS, _BLOCK)),
        x.scales,
        describe_kept(weight, (_BLOCK, _BLOCK)),
        scales,
        describe(out, (_ROWS, _BLOCK)),
        exponents,
        num_rows,
        num_tiles,
        strips,
        ceil_div(_BAND_ROWS, row_tile),
        ceil_div(in_features, _BLOCK * unit_tiles) * unit_tiles,
        out.shape[1],
    )


@lru_cache(maxsize=256)
def _kernel(device: torch.device, out_dtype: torch.dtype, scales_offset: int, *constants: object) -> KeptKernel:
    """Return the kernel for a type of results and for weight scales whose address is `scales_offset` modulo 16."""
    return KeptKernel(hopper_fp8_kernel, constants)
