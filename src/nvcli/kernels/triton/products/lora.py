"""The low-rank products of LoRA adapters in Triton: see `nvcli.kernels.lora`.

A step's rows are sorted by adapter once (`lora_rows.py`); a *tile* is up to `row_tile` rows of one adapter. For each
layer one launch multiplies the tiles by A (*shrink*; Punica, Chen et al. 2023), for all projections that the layer
fuses, and another multiplies the result by B and adds it to the layer's output (*expand*). The activation of a gated
MLP, which reads and writes the same values, is part of the second launch. With few rows the input features are split
among several programs, whose sums are float32 *parts*; expanding adds these up in a fixed order, so that nothing
depends on which program ends first.

The kernels are in `lora_kernels.py` and `lora_gated_kernel.py`.

Shapes: T rows, S rows of all tiles, full or not, J projections of a layer, P parts, R ranks that an adapter has room
for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.activation import Activation
from nvcli.kernels.lora_types import RANKS_AT_ONCE, AdaptedLayer, AdapterBank, AdapterRows
from nvcli.kernels.triton.launch.dependent_launch import dependent
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.lora_gated_kernel import expand_gated_kernel
from nvcli.kernels.triton.products.lora_kernels import LowRankKind, expand_kernel, shrink_kernel
from nvcli.kernels.whole_numbers import ceil_div

_FEW_ROWS = 1024
"""Maximum rows with which input features are split: decode steps."""


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
    gated_tile: int = 128
    """Output features that a program expands to at a time in the launch with the activation."""
    shrink_warps: int = 4
    expand_warps: int = 4
    gated_warps: int = 4
    shrink_stages: int = 3
    """Tiles of input features, plus one, that a program has under way at a time."""
    expand_stages: int = 1
    """Blocks that a program has under way at a time in the launch with the activation, if the ranks fit into a page."""


def add_low_rank(out: Tensor, x: Tensor, rows: AdapterRows, bank: AdapterBank, layer: AdaptedLayer) -> None:
    """See `nvcli.kernels.lora.add_low_rank`."""
    launch = _choose_low_rank_launch(rows)
    assert rows.tiles is not None
    assert out.is_contiguous()
    parts, kind = _shrink(x, rows, bank, layer, launch)
    num_blocks = len(layer.blocks)
    expand_kernel[_grid(len(rows.tiles.counts) * num_blocks, launch.expand_programs, x.device)](
        parts,
        rows.tiles,
        layer.blocks,
        bank.pages,
        out,
        bank.pages.stride(0),
        layer.up_offset,
        parts.shape[1],
        bank.ranks.shape[1],
        layer.first_projection,
        OUT_FEATURES=layer.out_features,
        NUM_BLOCKS=num_blocks,
        OUT_TILE=layer.block_features,
        FEATURE_ALIGN=layer.feature_align,
        KIND=kind,
        num_warps=launch.expand_warps,
        **dependent(x.device),
    )


def activate_with_low_rank(
    gate_up: Tensor,
    x: Tensor,
    rows: AdapterRows,
    bank: AdapterBank,
    layer: AdaptedLayer,
    activation: Activation,
) -> Tensor:
    """See `nvcli.kernels.lora.activate_with_low_rank`."""
    launch = _choose_low_rank_launch(rows)
    assert rows.tiles is not None
    assert gate_up.is_contiguous()
    assert layer.num_projections == 2
    size = layer.out_features // 2
    parts, kind = _shrink(x, rows, bank, layer, launch)
    out = torch.empty(len(x), size, dtype=gate_up.dtype, device=gate_up.device)
    num_blocks = ceil_div(size, launch.gated_tile)
    expand_gated_kernel[_grid(len(rows.tiles.counts) * num_blocks, launch.expand_programs, x.device)](
        parts,
        rows.tiles,
        bank.pages,
        gate_up,
        out,
        bank.pages.stride(0),
        layer.up_offset,
        parts.shape[1],
        bank.ranks.shape[1],
        layer.first_projection,
        SIZE=size,
        NUM_BLOCKS=num_blocks,
        OUT_TILE=launch.gated_tile,
        STAGES=launch.expand_stages if bank.max_rank <= PAGE_RANKS else 1,
        GELU=activation == "gelu_tanh",
        KIND=kind,
        num_warps=launch.gated_warps,
        **dependent(x.device),
    )
    return out


def _shrink(
    x: Tensor, rows: AdapterRows, bank: AdapterBank, layer: AdaptedLayer, launch: LowRankLaunch
) -> tuple[Tensor, LowRankKind]:
    """Multiply rows by A: [P, S, J, R] float32 parts, and the constants of the layer's products. The parts of rows
    without adapters are undefined."""
    assert rows.tiles is not None
    assert bank.pages.is_contiguous()
    assert x.stride(1) == 1
    num_slots, in_features = rows.tiles.order.numel(), layer.in_features
    part_features = max(launch.part_features or in_features, ceil_div(in_features, launch.most_parts))
    part_features = launch.in_tile * ceil_div(part_features, launch.in_tile)
    kind = LowRankKind(
        num_projections=layer.num_projections,
        num_parts=ceil_div(in_features, part_features),
        max_rank=bank.max_rank,
        row_tile=rows.row_tile,
        rank_tile=min(RANKS_AT_ONCE, bank.max_rank),
    )
    shape = kind.num_parts, num_slots, kind.num_projections, kind.max_rank
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    units = len(rows.tiles.counts) * kind.num_projections * kind.rank_blocks * kind.num_parts
    shrink_kernel[_grid(units, launch.shrink_programs, x.device)](
        x,
        rows.tiles,
        bank.pages,
        parts,
        x.stride(0),
        bank.pages.stride(0),
        layer.down_offset,
        num_slots,
        bank.ranks.shape[1],
        layer.first_projection,
        IN_FEATURES=in_features,
        PART_FEATURES=part_features,
        IN_TILE=launch.in_tile,
        KIND=kind,
        num_warps=launch.shrink_warps,
        num_stages=launch.shrink_stages,
        **dependent(x.device),
    )
    return parts, kind


def _grid(units: int, programs: int, device: torch.device) -> tuple[int]:
    """Return the number of programs for at most `units` units of work."""
    return (max(1, min(units, programs * num_multiprocessors(device))),)


def _choose_low_rank_launch(rows: AdapterRows) -> LowRankLaunch:
    """Choose the launch parameters for some rows. A batch-invariant launch adds up in the same order for any number of
    rows.

    They were the best of 30 for few rows and of 9 for many on an H200, for an 8B model (H 4,096, I 12,288) with rank 16
    on all linear layers. A layer without its attention takes 33 µs more for 256 rows with 8 adapters than with none,
    which take 223, and 74 with 64; for 8,192 rows, which take 4.8 ms, 0.30 and 0.36 ms.
    """
    if rows.batch_invariant:
        return LowRankLaunch(256, 0, 1, 8, 8)
    if len(rows.adapters) <= _FEW_ROWS:
        return LowRankLaunch(256, 512, 12, 4, 4, shrink_warps=2, expand_stages=3)
    return LowRankLaunch(128, 0, 1, 4, 4, gated_tile=64, shrink_stages=4, gated_warps=8, expand_stages=3)
