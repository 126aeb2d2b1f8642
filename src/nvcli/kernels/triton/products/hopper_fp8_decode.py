"""The launches of the products of up to some hundred rows with FP8 weights on Hopper GPUs
(`hopper_fp8_decode_kernel.py`).

They serve activations in FP8 and scales by rows of both factors. Everything else, and every other GPU, is for
`products.py`. Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.triton.launch.descriptors import TILE_BYTES, describe, describe_kept
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.hopper_fp8_decode_kernel import (
    BLOCK,
    GROUPS,
    TILE,
    halves_rows,
    hopper_fp8_decode_kernel,
)
from nvcli.kernels.triton.products.product_launch import DecodeLaunch
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK: int = BLOCK.value
_GROUPS: int = GROUPS.value
_TILE: int = TILE.value
_STRIP = _GROUPS * _BLOCK
_HALF_COST = 0.57
"""Time of half an item, in times of a whole one. Two halves read more bytes than a whole."""


def num_stages(row_tile: int) -> int:
    """Count the stages that fit in shared memory beside one block of a result in 16 bits."""
    of_result = 2 * row_tile * _BLOCK
    return (TILE_BYTES - of_result) // ((_STRIP + row_tile) * _TILE)


def linear(x: QuantisedRows, weight: Tensor, scales: Tensor, launch: DecodeLaunch, out: Tensor | None = None) -> Tensor:
    """x Wᵀ without a bias: [T, in] and [out, in] → [T, out] in the type of the activations, in `out` (contiguous) if
    that is given; or with several parts [P, T, out] float32. The weight has a scale for each row.

    The kernel before this one in the stream may still run when the weight is read first: it must not write the weight.
    """
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert x.codes.is_contiguous()
    assert weight.is_contiguous()
    in_tiles = ceil_div(in_features, _TILE)
    part_tiles = ceil_div(in_tiles, launch.num_parts)
    num_parts = ceil_div(in_tiles, part_tiles)
    if num_parts > 1:
        assert out is None
        out = torch.empty(num_parts, num_rows, out_features, dtype=torch.float32, device=weight.device)
    elif out is None:
        out = torch.empty(num_rows, out_features, dtype=x.dtype, device=weight.device)
    assert out.is_contiguous()
    assert out.numel() < 1 << 31, "the kernel counts in 32 bits"
    if num_rows == 0:
        return out
    programs = num_multiprocessors(weight.device)
    work = share_out(out_features, num_rows, launch.row_tile, num_parts, programs)
    hopper_fp8_decode_kernel[(min(work.num_items(num_parts), programs),)](
        describe(x.codes, (launch.row_tile // _GROUPS, _TILE)),
        x.scales,
        describe_kept(weight, (_BLOCK, _TILE)),
        scales,
        out,
        num_rows,
        out_features,
        *work,
        num_parts,
        part_tiles,
        in_tiles,
        OUT_BYTES=out.element_size(),
        ROW_TILE=launch.row_tile,
        NUM_STAGES=num_stages(launch.row_tile),
        num_warps=4,
        launch_pdl=True,
    )
    return out


class Work(NamedTuple):
    """The work of each part: whole items, and items with half of the rows or half of the features."""

    row_tiles: int
    rest_tiles: int
    """Tiles of half the rows at the end of a whole strip: 0 or 1."""
    half_tiles: int
    """Tiles of rows in the strips that consist of halves."""
    whole_strips: int
    half_strips: int

    def num_items(self, num_parts: int) -> int:
        return sum(self._counts) * num_parts

    def cost(self, num_parts: int, num_programs: int) -> float:
        """Return the time of the slowest program, in times of a whole item. Programs take items in turn."""
        wholes, halves = (count * num_parts for count in self._counts)

        def of_program(program: int) -> float:
            of_wholes = -(-(wholes - program) // num_programs)
            of_all = -(-(wholes + halves - program) // num_programs)
            return of_wholes + _HALF_COST * (of_all - of_wholes)

        # The first one, and the first one of those that have less whole items.
        return max(of_program(0), of_program(wholes % num_programs))

    @property
    def _counts(self) -> tuple[int, int]:
        """Whole items and halves."""
        halves = self.rest_tiles * self.whole_strips + self.half_tiles * self.half_strips
        return self.row_tiles * self.whole_strips, halves


def share_out(out_features: int, num_rows: int, row_tile: int, num_parts: int, num_programs: int) -> Work:
    """Cut a product into items so that `num_programs` programs end together."""
    half_rows = row_tile // 2 if halves_rows(row_tile) else row_tile
    return _share_out(out_features, -(-num_rows // half_rows), row_tile, num_parts, num_programs)


@lru_cache(maxsize=1024)
def _share_out(out_features: int, half_tiles: int, row_tile: int, num_parts: int, num_programs: int) -> Work:
    strips = -(-out_features // _STRIP)
    options = [make_work(out_features, half_tiles, row_tile, whole_strips) for whole_strips in range(strips, -1, -1)]
    return min(options, key=lambda option: option.cost(num_parts, num_programs))


def make_work(out_features: int, half_tiles: int, row_tile: int, whole_strips: int) -> Work:
    """Return the work with `whole_strips` strips of whole items; `half_tiles` is the number of tiles of rows of half
    items."""
    if halves_rows(row_tile):
        half_strips = -(-out_features // _STRIP) - whole_strips
        return Work(half_tiles // 2, half_tiles % 2, half_tiles, whole_strips, half_strips)
    half_strips = max(0, -(-out_features // _BLOCK) - whole_strips * _GROUPS)
    return Work(half_tiles, 0, half_tiles, whole_strips, half_strips)
