"""The launches of the products of many rows with FP8 weights on Hopper GPUs (`hopper_fp8_kernel.py`).

Shapes: T rows, `in` and `out` features, G = in / 128, rounded up; of experts E, and k of each token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix, ExpertWeights, Routes
from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.elementwise.fp8 import quantise_pairs, share_scales
from nvcli.kernels.triton.launch.descriptors import TILE_BYTES, describe, describe_kept
from nvcli.kernels.triton.launch.kept_kernel import KeptKernel
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.expert_groups import WorkList
from nvcli.kernels.triton.products.hopper_fp8_kernel import BLOCK, ROWS, HopperFP8Kind, hopper_fp8_kernel
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


class Grouped(NamedTuple):
    """The work list and the routes of a product of experts."""

    work: WorkList
    """Items of as many rows as a tile has."""
    routes: Routes


def linear(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    launch: HopperFP8Launch,
    out: Tensor | None = None,
    grouped: Grouped | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x Wᵀ of at least one row: [T, in] → [T, out] of 16 bits, in `out` (contiguous) if that is given. `in` and `out`
    are multiples of 16. Both factors have scales by rows; or both by blocks, with one block in the launch (there are no
    registers for two) and one tile in a unit.

    With `grouped` x has a row for each pair, sorted by expert, the weight is [E, out, in], with scales by rows, there
    may be a bias [E, out], and the results are multiplied by the pairs' weights: [k, tokens, out]. Further columns of x
    than the weight has do not count.
    """
    out_features = weight.shape[-2]
    if out is None:
        out = torch.empty(len(x.codes), out_features, dtype=x.dtype, device=weight.device)
    strips = ceil_div(out_features, launch.blocks * _BLOCK)
    _launch(x, weight, scales, launch, out.view(-1, out_features), strips, grouped, bias=bias)
    return out


def gated_linear(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    launch: HopperFP8Launch,
    grouped: Grouped | None = None,
    bias: Tensor | None = None,
    *,
    activation: ExpertActivation,
) -> QuantisedRows:
    """The activation of x Wgᵀ and x Wuᵀ of at least one row, quantised by rows, with scales that are powers of two.
    weight: [2 out, in], `out` a multiple of 128 → [T, out]. Both factors have scales by rows, and the launch has two
    blocks.

    With `grouped` x has a row for each pair, sorted by expert, the weight is [E, 2 out, in], there may be a bias
    [E, 2 out], and the result has zeros behind `out` up to a multiple of 128.
    """
    assert launch.blocks == 2
    assert scales.dim() == weight.dim() - 1
    num_rows, out_features = len(x.codes), weight.shape[-2] // 2
    assert grouped is not None or out_features % _BLOCK == 0
    strips = ceil_div(out_features, _BLOCK)
    codes = torch.empty(num_rows, strips * _BLOCK, dtype=FP8, device=weight.device)
    exponents = torch.empty(num_rows, strips, dtype=torch.uint8, device=weight.device)
    _launch(x, weight, scales, launch, codes, strips, grouped, bias=bias, exponents=exponents, activation=activation)
    return QuantisedRows(codes, share_scales(codes, exponents), x.dtype)


def apply_experts(
    x: Tensor,
    weights: ExpertWeights,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    grouped: Grouped,
    launch: HopperFP8Launch,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Compute each pair's result times its weight: [T, H] of 16 bits → `out` [k, T, H], of the same type. Weights have
    scales by rows, and the launch has two blocks."""
    assert gate_up.scales is not None
    assert down.scales is not None
    places, hidden_size = grouped.work.places, x.shape[1]
    assert places is not None
    # The rows of x, sorted by expert, are where the results will be, which are larger.
    codes = out.view(-1).view(FP8)[: len(places) * hidden_size].view(-1, hidden_size)
    pairs = quantise_pairs(x, places, codes)
    hidden = gated_linear(pairs, gate_up.weight, gate_up.scales, launch, grouped, gate_up.bias, activation=activation)
    linear(hidden, down.weight, down.scales, launch, out, grouped, down.bias)


def _launch(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    launch: HopperFP8Launch,
    out: Tensor,
    strips: int,
    grouped: Grouped | None,
    *,
    bias: Tensor | None,
    exponents: Tensor | None = None,
    activation: ExpertActivation | None = None,
) -> None:
    """Launch the kernel; `exponents` and `activation` are those of a gated product."""
    by_blocks, unit_tiles = scales.dim() == 2 and grouped is None, launch.unit_tiles or 1
    assert (x.scales.dim() == 2) == by_blocks
    assert not by_blocks or (launch.blocks, launch.unit_tiles) == (1, 1)
    for tensor in (x.codes, x.scales, weight, scales, bias, out):
        assert tensor is None or tensor.is_contiguous()
    num_rows, in_features = x.shape
    row_tile = launch.groups * _ROWS
    work, routes = grouped or (None, None)
    assert work is None or work.row_tile == row_tile
    num_tiles = (ceil_div(num_rows, row_tile) if work is None else len(work.items)) * strips
    kind = HopperFP8Kind(
        groups=launch.groups,
        blocks=launch.blocks,
        num_stages=num_stages(launch),
        unit_tiles=launch.unit_tiles,
        by_blocks=by_blocks,
        activation=activation,
        experts_per_token=0 if routes is None else routes.experts.shape[1],
    )
    bias_kind = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
    kernel = _kernel(x.codes.device, out.dtype, scales.data_ptr() % 16, bias_kind, kind)
    kernel.launch(
        min(num_tiles, num_multiprocessors(x.codes.device)),
        describe(x.codes, (_ROWS, _BLOCK)),
        x.scales,
        describe_kept(weight.flatten(0, -2), (_BLOCK, _BLOCK)),
        scales,
        describe(out, (_ROWS, _BLOCK)),
        bias,
        exponents,
        None if work is None else out,
        None if work is None else work.items,
        None if work is None else work.order,
        None if routes is None else routes.weights,
        num_rows,
        num_tiles,
        strips,
        ceil_div(_BAND_ROWS, row_tile),
        ceil_div(in_features, _BLOCK * unit_tiles) * unit_tiles,
        out.shape[1],
        weight.shape[-2],
        0 if routes is None else len(routes.experts),
    )


@lru_cache(maxsize=256)
def _kernel(
    device: torch.device,
    out_dtype: torch.dtype,
    scales_offset: int,
    bias_kind: tuple[torch.dtype, int] | None,
    kind: HopperFP8Kind,
) -> KeptKernel:
    """Return the kernel for a type of results, and of biases if there are some, and for weight scales and biases whose
    addresses are these modulo 16."""
    return KeptKernel(hopper_fp8_kernel, (kind,))
