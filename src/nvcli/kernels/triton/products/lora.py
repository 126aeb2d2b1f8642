"""The low-rank products of LoRA adapters in Triton: see `nvcli.kernels.lora`.

A step's rows are sorted by adapter once (`lora_rows.py`); a *tile* is up to `row_tile` rows of one adapter. For each
layer one launch multiplies the tiles by A (*shrink*; Punica, Chen et al. 2023), for all projections that the layer
fuses, and another multiplies the result by B and adds it to the layer's output (*expand*). The activation of a gated
MLP, which reads and writes the same values, is part of the second launch. With few rows the input features are split
among several programs, whose sums are float32 *parts*; expanding adds these up in a fixed order, so that nothing
depends on which program ends first.

The kernels are in `lora_kernels.py`.

Shapes: T rows, J projections of a layer, L places for adapters, P parts, R ranks that an adapter has room for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.lora_types import BLOCK_FIELDS, RANKS_AT_ONCE, TILE_FIELDS, AdaptedLayer, AdapterBank, AdapterRows
from nvcli.kernels.triton.launch.dependent_launch import dependent
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.lora_kernels import expand_gated_kernel, expand_kernel, shrink_kernel
from nvcli.kernels.triton.products.product_launch import Gate
from nvcli.kernels.whole_numbers import ceil_div

_FEW_ROWS = 1024
"""Maximum rows with which input features are split: decode steps."""
_GATED_FEATURES = 128


class LowRankLaunch(NamedTuple):
    """The launch parameters of the products for some number of rows."""

    in_tile: int
    """Input features that a program multiplies at a time."""
    part_features: int
    """Input features per part; 0: all."""
    most_parts: int
    """Maximum parts; if there are many features, each part has more of them."""
    shrink_programs: int
    """Programs per multiprocessor."""
    expand_programs: int
    shrink_warps: int = 4
    expand_warps: int = 4
    shrink_stages: int = 3
    """Tiles of input features, plus one, that a program has under way at a time."""
    expand_stages: int = 1
    """Blocks that a program has under way at a time in the launch with the activation, if the ranks fit into a page."""


def add_low_rank(
    out: Tensor,
    x: Tensor,
    rows: AdapterRows,
    bank: AdapterBank,
    layer: AdaptedLayer,
    launch: LowRankLaunch | None = None,
) -> None:
    """See `nvcli.kernels.lora.add_low_rank`."""
    launch = choose_launch(rows) if launch is None else launch
    assert out.is_contiguous()
    parts = _shrink(x, rows, bank, layer, launch)
    num_blocks = len(layer.blocks)
    expand_kernel[_grid(len(rows.tiles) * num_blocks, launch.expand_programs, x.device)](
        parts,
        rows.order,
        rows.tiles,
        rows.num_tiles,
        layer.blocks,
        bank.pages,
        bank.page_table,
        bank.ranks,
        bank.scales,
        out,
        bank.pages.stride(0),
        layer.up_offset,
        len(x),
        bank.ranks.shape[1],
        layer.first_projection,
        OUT_FEATURES=layer.out_features,
        NUM_BLOCKS=num_blocks,
        NUM_PROJECTIONS=layer.num_projections,
        NUM_PARTS=len(parts),
        MAX_RANK=bank.max_rank,
        ROW_TILE=rows.row_tile,
        RANK_TILE=min(RANKS_AT_ONCE, bank.max_rank),
        OUT_TILE=layer.block_features,
        FEATURE_ALIGN=layer.feature_align,
        PAGE_RANKS=PAGE_RANKS,
        TILE_FIELDS=TILE_FIELDS,
        BLOCK_FIELDS=BLOCK_FIELDS,
        num_warps=launch.expand_warps,
        **dependent(x.device),
    )


def activate_with_low_rank(
    gate_up: Tensor,
    x: Tensor,
    rows: AdapterRows,
    bank: AdapterBank,
    layer: AdaptedLayer,
    activation: Gate,
    launch: LowRankLaunch | None = None,
) -> Tensor:
    """See `nvcli.kernels.lora.activate_with_low_rank`."""
    launch = choose_launch(rows) if launch is None else launch
    assert gate_up.is_contiguous()
    assert layer.num_projections == 2
    size = layer.out_features // 2
    parts = _shrink(x, rows, bank, layer, launch)
    out = torch.empty(len(x), size, dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = ceil_div(size, _GATED_FEATURES)
    expand_gated_kernel[_grid(len(rows.tiles) * num_blocks, launch.expand_programs, x.device)](
        parts,
        rows.order,
        rows.tiles,
        rows.num_tiles,
        bank.pages,
        bank.page_table,
        bank.ranks,
        bank.scales,
        gate_up,
        out,
        bank.pages.stride(0),
        layer.up_offset,
        len(x),
        bank.num_places,
        bank.ranks.shape[1],
        layer.first_projection,
        SIZE=size,
        NUM_BLOCKS=num_blocks,
        NUM_PARTS=len(parts),
        MAX_RANK=bank.max_rank,
        ROW_TILE=rows.row_tile,
        RANK_TILE=min(RANKS_AT_ONCE, bank.max_rank),
        OUT_TILE=_GATED_FEATURES,
        STAGES=launch.expand_stages if bank.max_rank <= PAGE_RANKS else 1,
        GELU=activation == "gelu_tanh",
        PAGE_RANKS=PAGE_RANKS,
        TILE_FIELDS=TILE_FIELDS,
        num_warps=launch.expand_warps,
        **dependent(x.device),
    )
    return out


def _shrink(x: Tensor, rows: AdapterRows, bank: AdapterBank, layer: AdaptedLayer, launch: LowRankLaunch) -> Tensor:
    """Multiply rows by A: [P, T, J, R] float32 parts, in the sorted order of the rows. The parts of rows without
    adapters are undefined."""
    assert bank.pages.is_contiguous()
    assert x.stride(1) == 1
    num_rows, in_features = len(x), layer.in_features
    part_features = max(launch.part_features or in_features, ceil_div(in_features, launch.most_parts))
    part_features = launch.in_tile * ceil_div(part_features, launch.in_tile)
    num_parts, rank_tile = ceil_div(in_features, part_features), min(RANKS_AT_ONCE, bank.max_rank)
    parts = torch.empty(num_parts, num_rows, layer.num_projections, bank.max_rank, dtype=torch.float32, device=x.device)
    units = len(rows.tiles) * layer.num_projections * (bank.max_rank // rank_tile) * num_parts
    shrink_kernel[_grid(units, launch.shrink_programs, x.device)](
        x,
        rows.order,
        rows.tiles,
        rows.num_tiles,
        bank.pages,
        bank.page_table,
        bank.ranks,
        parts,
        x.stride(0),
        bank.pages.stride(0),
        layer.down_offset,
        num_rows,
        bank.ranks.shape[1],
        layer.first_projection,
        IN_FEATURES=in_features,
        NUM_PROJECTIONS=layer.num_projections,
        NUM_PARTS=num_parts,
        PART_FEATURES=part_features,
        MAX_RANK=bank.max_rank,
        ROW_TILE=rows.row_tile,
        RANK_TILE=rank_tile,
        IN_TILE=launch.in_tile,
        PAGE_RANKS=PAGE_RANKS,
        TILE_FIELDS=TILE_FIELDS,
        num_warps=launch.shrink_warps,
        num_stages=launch.shrink_stages,
        **dependent(x.device),
    )
    return parts


def _grid(units: int, programs: int, device: torch.device) -> tuple[int]:
    """Return the number of programs for at most `units` units of work."""
    return (max(1, min(units, programs * num_multiprocessors(device))),)


def choose_launch(rows: AdapterRows) -> LowRankLaunch:
    """Choose the launch parameters for some rows. A batch-invariant launch adds up in the same order for any number of
    rows.

    The parameters for few rows were the best of 13 tried on an H200; none of 23 others was clearly better. There the
    low-rank products and the activation of one layer of an 8B model (H 4,096, I 12,288, 256 rows, rank 16 on all linear
    layers) take 76 µs with one adapter, 78 with 8, 133 with 64 and 306 with 213, without the base products; of that,
    the launch with the activation and its shrinking 25, 26, 51 and 122.
    """
    if rows.batch_invariant:
        return LowRankLaunch(256, 0, 1, 8, 8)
    if len(rows.adapters) <= _FEW_ROWS:
        return LowRankLaunch(256, 1024, 6, 4, 4, shrink_warps=2, expand_stages=3)
    return LowRankLaunch(64, 0, 1, 4, 2, expand_warps=8)
