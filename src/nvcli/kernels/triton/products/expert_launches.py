"""Launches of the products of experts, chosen by the format of the weights and the mean number of rows of an expert.
With few rows, reading the weight sets the time: tiles are small, so that several programs run on each multiprocessor.
With many, tiles are as large as registers allow.

Chosen on an H200 among 215 launches for Qwen3-30B-A3B, Qwen3.5-35B-A3B, gpt-oss-20b and 120b, whole and cut for 2 and 4
ranks, with 1 to 8,192 tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix
from nvcli.kernels.triton.products.product_launch import ExpertTiles, HopperFP8Launch, HopperW4Launch, fit, for_format
from nvcli.kernels.triton.products.w4_linear import has_hopper_kernel, takes_experts
from nvcli.kernels.weight_formats import FP8_ALIGNMENT, FP8_BLOCK


class ExpertLaunch(NamedTuple):
    """The launches of both products."""

    row_tile: int
    """The most rows of an item."""
    gate_up: ExpertTiles
    down: ExpertTiles


_FLOAT32 = ExpertLaunch(16, ExpertTiles(32, 64, 3, 4, rows_first=True), ExpertTiles(64, 64, 3, 4, rows_first=True))
_INVARIANT = ExpertLaunch(
    64, ExpertTiles(64, 64, 3, 4, rows_first=True), ExpertTiles(128, 64, 3, 4, rows_first=True, has_tiles=True)
)
_HOPPER_W4 = HopperW4Launch(128, 2)
_HOPPER_FP8 = HopperFP8Launch(2, 2, 2)
_HOPPER_FP8_ROWS = 512
"""The least mean rows of an expert that the kernel for Hopper GPUs multiplies by FP8 weights. A layer of Qwen3-30B-A3B
takes an H200 877 µs with it and 986 without at 8,192 tokens, 512 for each expert, and 1,596 and 1,961 at 16,384;
Qwen3.5-35B-A3B's 878 and 851 at 8,192, 256 for each; gpt-oss-20b's 1,798 and 2,052 at 8,192, 1,024 for each, and
1,138 and 1,113 at 4,096."""
_MOST_PADDING = 1 / 8
"""The most that this kernel may add to the features between both products, which it multiplies in whole blocks."""
_FEW_FEATURES = 512
_LARGE_TILES = (9, 10)
"""Major compute capabilities of the GPUs whose matrix units take tiles of many rows without filling all registers."""
_MEDIUM_ROWS = 48
"""Up to this mean number of rows, tiles have at most 64 rows in every format."""
_MANY_PROGRAMS = 1600
"""From this number of programs on, tiles of twice the features are faster: the last round is a small part of all."""


def choose_expert_launch(
    num_rows: float,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    x: Tensor,
    activation: ExpertActivation,
    *,
    quantises: bool,
    batch_invariant: bool,
) -> ExpertLaunch | HopperFP8Launch | HopperW4Launch:
    """Choose the launch for a mean number of rows of an expert. With `batch_invariant` it is the same for every number
    of rows."""
    if activation.is_gated and takes_experts(num_rows, x, gate_up, down):
        return _HOPPER_W4
    if quantises and num_rows >= _HOPPER_FP8_ROWS and _serves_fp8_on_hopper(gate_up, down, x, activation):
        return _HOPPER_FP8
    if not _takes_large_tiles(x.device):
        num_rows = min(num_rows, _MEDIUM_ROWS)
    if gate_up.kind == "mxfp4 for fp8":
        launch = _for_4_bits_and_fp8(num_rows)
    elif gate_up.format is not None and down.format is not None:
        launch = _for_4_bits(num_rows, down, is_integer=gate_up.kind == "integer")
        launch = launch._replace(
            gate_up=for_format(launch.gate_up, gate_up.format), down=for_format(launch.down, down.format)
        )
    elif quantises:
        launch = _for_fp8(num_rows, by_blocks=gate_up.kind == "block")
    elif gate_up.kind != "plain":
        launch = _for_codes(num_rows)
    elif x.element_size() > 2:
        launch = _FLOAT32
    else:
        launch = _INVARIANT if batch_invariant else _for_plain(num_rows, down.weight.shape[-1])
    x_bytes = 1 if quantises else x.element_size()
    return launch._replace(
        gate_up=fit(launch.gate_up, launch.row_tile, x.device, x_bytes, _bytes_of_number(gate_up), num_weights=2),
        down=fit(launch.down, launch.row_tile, x.device, x_bytes, _bytes_of_number(down)),
    )


def _bytes_of_number(matrix: ExpertMatrix) -> float:
    return matrix.weight.element_size() if matrix.format is None else matrix.format.bits / 8


def _serves_fp8_on_hopper(gate_up: ExpertMatrix, down: ExpertMatrix, x: Tensor, activation: ExpertActivation) -> bool:
    size, hidden_size = down.weight.shape[-1], gate_up.weight.shape[-1]
    return (
        gate_up.kind == down.kind == "channel"
        and activation.is_gated
        and size % FP8_ALIGNMENT == hidden_size % FP8_ALIGNMENT == 0
        and -size % FP8_BLOCK <= _MOST_PADDING * size
        and x.element_size() == 2
        and x.is_cuda
        and has_hopper_kernel(x.device)
    )


@lru_cache(maxsize=64)
def _takes_large_tiles(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in _LARGE_TILES


def _for_plain(num_rows: float, size: int) -> ExpertLaunch:
    """`size`: an expert's intermediate size."""
    has_few_features = size < _FEW_FEATURES
    if num_rows <= 12:
        gate_up = ExpertTiles(32, 256, 3, 4, rows_first=True) if num_rows <= 0.25 else ExpertTiles(64, 128, 3, 4)
        down = ExpertTiles(128, 64, 4, 4) if has_few_features else ExpertTiles(64 if num_rows <= 1 else 128, 128, 3, 4)
        return ExpertLaunch(16, gate_up, down)
    if num_rows <= 24:
        down = ExpertTiles(256, 64, 3, 8) if has_few_features else ExpertTiles(64, 128, 3, 4, has_halves=True)
        return ExpertLaunch(32, ExpertTiles(64, 64, 5, 4, has_halves=True), down)
    if num_rows <= _MEDIUM_ROWS:
        return ExpertLaunch(64, ExpertTiles(64, 64, 4, 4, has_halves=True), ExpertTiles(128, 64, 4, 4, has_halves=True))
    gate_up = ExpertTiles(64, 64, 3, 4) if num_rows <= 96 else ExpertTiles(128, 64, 4, 8, rows_first=True)
    down = ExpertTiles(128, 64, 3, 4, rows_first=True, has_tiles=True, has_halves=True)
    return ExpertLaunch(128, gate_up._replace(has_halves=True), down)


def _for_fp8(num_rows: float, *, by_blocks: bool) -> ExpertLaunch:
    if num_rows <= 24:
        down = ExpertTiles(64, 128, 4, 4)
        if by_blocks or num_rows <= 1:
            down = ExpertTiles(128, 128, 4, 8 if by_blocks else 4)
        if num_rows <= 12:
            return ExpertLaunch(16, ExpertTiles(64, 128, 6, 4), down)
        return ExpertLaunch(32, ExpertTiles(64, 128, 5, 4), down._replace(has_halves=True))
    if num_rows <= 96 or by_blocks:
        return ExpertLaunch(
            64,
            ExpertTiles(64, 128, 4, 4, rows_first=True),
            ExpertTiles(128, 128, 4, 4, rows_first=True, has_tiles=True),
        )
    return ExpertLaunch(
        128,
        ExpertTiles(128, 128, 3, 8, rows_first=True, has_halves=True),
        ExpertTiles(128, 128, 3, 4, rows_first=True, has_tiles=True, has_halves=True),
    )


def _for_codes(num_rows: float) -> ExpertLaunch:
    """Choose the launch for FP8 weights with plain activations. It was not measured."""
    row_tile = 16 if num_rows <= 8 else 32 if num_rows <= 32 else 64
    both = ExpertTiles(64, 64, 3, 4, rows_first=row_tile == 64)
    return ExpertLaunch(row_tile, both, both)


def _for_4_bits_and_fp8(num_rows: float) -> ExpertLaunch:
    """Choose the launch for MXFP4 with activations in FP8. A layer of gpt-oss-120b takes 457 µs for 256 tokens, and 638
    with activations in bfloat16; gpt-oss-20b's 200 and 234, and 239 with weights in FP8."""
    row_tile = 16 if num_rows <= 12 else 32 if num_rows <= 24 else 64 if num_rows <= 96 else 128
    gate_up, down = ExpertTiles(64, 128, 4, 4), ExpertTiles(128, 128, 4, 4)
    if row_tile == 128:
        down = ExpertTiles(128, 128, 3, 8)
    has_halves = row_tile > 16
    return ExpertLaunch(row_tile, gate_up._replace(has_halves=has_halves), down._replace(has_halves=has_halves))


def _for_4_bits(num_rows: float, down: ExpertMatrix, *, is_integer: bool) -> ExpertLaunch:
    if num_rows <= 12:
        num_experts, out_features = down.weight.shape[:2]
        num_programs = min(num_rows, 1) * num_experts * out_features / 128
        return ExpertLaunch(
            16, ExpertTiles(64, 128, 3, 4), ExpertTiles(128 if num_programs >= _MANY_PROGRAMS else 64, 128, 4, 4)
        )
    row_tile = 32 if num_rows <= 24 else 64 if num_rows <= _MEDIUM_ROWS or is_integer else 128
    return ExpertLaunch(
        row_tile, ExpertTiles(64, 128, 3, 4, has_halves=True), ExpertTiles(128, 128, 3, 4, has_halves=True)
    )
