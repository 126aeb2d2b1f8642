"""Launch parameters of products: of the kernel for all GPUs (`products.py`), and of those for Hopper GPUs."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeVar

import torch

from nvcli.kernels.triton.launch.multiprocessors import shared_memory_bytes
from nvcli.kernels.weight_formats import W4Format

Kind = Literal["plain", "sum", "gated"]
"""The kind of a layer's product. "plain": a result in 16 bits. "sum": float32 parts for a residual sum. "gated": gate
and up projection side by side, with the activation."""

_BESIDE_TILES = 2 << 10
"""Bytes of shared memory that a program takes beside its tiles."""
_LEAST_STAGES, _LEAST_ROWS, _LEAST_FEATURES = 2, 16, 32
_MOST_STAGES = 8


class ProductLaunch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """Features of the result; a gated product multiplies as many of the gate and of the up projection. It is at most
    128 for scales by blocks, so that the features of a tile share their scales."""
    in_tile: int
    """128 for scales by blocks and for weights of 4 bits; 64 of NVFP4, and less of 8 bits."""
    num_stages: int
    num_warps: int
    num_parts: int = 1
    """Into how many parts the input features are cut, which are multiplied by programs of their own."""
    rows_together: int = 0
    """How many tiles of rows are computed before the next features; 0: all."""
    num_programs: int = 0
    """Persistent programs of each multiprocessor; 0: a program computes one tile."""
    has_constants: bool = False
    """Whether the numbers of features are constants of the kernel, which is then compiled for each shape. On an H200
    that saves up to 8 % with few rows of 16 bits, and 4 to 11 % for the gated product of many."""
    x_by_tma: bool = True
    weight_by_tma: bool = True
    """Whether TMA fetches these, or pointers do. Words of 4-bit codes and their activations are read by pointers."""


class ExpertTiles(NamedTuple):
    """The tiles of a product of experts and how its programs work (`experts.py`)."""

    out_tile: int
    """Features of the result, at most 128 for FP8 with scales by blocks. The gated product multiplies as many of the
    gate and of the up projection."""
    in_tile: int
    """128 for FP8 with scales by blocks and for 4 bits, of NVFP4 64."""
    num_stages: int
    num_warps: int
    rows_first: bool = False
    """Whether a tile's rows are the first operand of the matrix units, of which those of Hopper take 64 or more.
    Weights in 4 bits always come first."""
    has_tiles: bool = False
    """Whether the tensor memory accelerator fetches whole tiles of rows, which are sorted."""
    has_halves: bool = False
    """Whether items of at most half the rows are multiplied in tiles of half the size."""


class HopperFP8Launch(NamedTuple):
    """The tile of a product of many rows with an FP8 weight on Hopper GPUs (`hopper_fp8.py`)."""

    groups: int
    """Groups of warps that multiply 64 rows each: 2 or 3."""
    blocks: int
    """Blocks of 128 features: 1, or for two groups 2. A gated product has 2: one of the gate, one of up."""
    unit_tiles: int | None = 1
    """For how many times 128 input features FP8 units add up products before the sums are added up in float32. None:
    for all of them. With scales by blocks it is 1."""

    @property
    def row_tile(self) -> int:
        return 64 * self.groups


class DecodeLaunch(NamedTuple):
    """How a product of the rows of a decode step with an FP8 weight is launched on Hopper GPUs
    (`hopper_fp8_decode.py`)."""

    row_tile: int
    """32, 64, 128 or 256."""
    num_parts: int = 1
    """Into how many parts the input features are cut, for a residual sum."""


class HopperW4Launch(NamedTuple):
    """How a product with a weight of 4 bits is launched on Hopper GPUs (`hopper_w4.py`)."""

    row_tile: int
    """Rows of activations: 16, 32, 64 or 128."""
    blocks: int
    """Blocks of 64 rows of a weight that each of a program's two groups of warps multiplies: 1 to 3."""
    num_parts: int = 1
    """Into how many parts the input features are cut, which are multiplied by programs of their own."""


_Tiles = TypeVar("_Tiles", ProductLaunch, ExpertTiles)


def for_format(launch: _Tiles, format: W4Format) -> _Tiles:
    """Return the launch of a product with a weight of 4 bits for the tiles of its format: smaller ones are fetched
    further ahead."""
    stages = launch.num_stages * launch.in_tile // format.tile
    return launch._replace(in_tile=format.tile, num_stages=min(stages, max(launch.num_stages, _MOST_STAGES)))


def fit(
    launch: _Tiles, row_tile: int, device: torch.device, x_bytes: float, weight_bytes: float, num_weights: int = 1
) -> _Tiles:
    """Reduce the stages, and then the tiles, until a GPU's shared memory holds them: tiles of rows, or for experts,
    whose work list already has `row_tile`, of features. `x_bytes`, `weight_bytes`: bytes of a number of each; a gated
    product has two weights."""
    most_bytes = shared_memory_bytes(device) - _BESIDE_TILES if device.type == "cuda" else math.inf
    while True:
        features = num_weights * launch.out_tile
        if launch.num_stages * launch.in_tile * (row_tile * x_bytes + features * weight_bytes) <= most_bytes:
            return launch
        if launch.num_stages > _LEAST_STAGES:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif isinstance(launch, ProductLaunch) and row_tile > _LEAST_ROWS:
            row_tile //= 2
            launch = launch._replace(row_tile=row_tile)
        elif isinstance(launch, ExpertTiles) and launch.out_tile > _LEAST_FEATURES:
            launch = launch._replace(out_tile=launch.out_tile // 2)
        else:
            return launch
