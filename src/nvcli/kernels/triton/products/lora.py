"""The low-rank products of LoRA adapters in Triton: see `nvcli.kernels.lora`.

A step's rows are sorted by adapter once (`lora_rows.py`); a *tile* is up to `row_tile` rows of one adapter. For each
layer one launch multiplies the tiles by A (*shrink*; Punica, Chen et al. 2023), for all projections that the layer
fuses, and another multiplies the result by B and adds it to the layer's output (*expand*). The activation of a gated
MLP, which reads and writes the same values, is part of the second launch. With few rows the input features are split
among several programs, whose sums are float32 *parts*; expanding adds these up in a fixed order, so that nothing
depends on which program ends first.

The number of tiles is known on the GPU only: a few programs per multiprocessor take one unit of work after another
until none is left. So launches in a CUDA graph serve any mix of adapters, and cost little if there are few tiles. A
program reads which tile it works on before it waits for the previous kernel: rows are grouped at the start of the step,
and between that and the first of these launches comes one that is not a dependent launch (of the embedding, or of the
rotary tables), which starts only when everything before it has ended.

Shapes: T rows, J projections of a layer, L places for adapters, P parts, R ranks that an adapter has room for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.lora_types import BLOCK_FIELDS, RANKS_AT_ONCE, TILE_FIELDS, AdaptedLayer, AdapterBank, AdapterRows
from nvcli.kernels.triton.elementwise.activation import activate
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
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
    expand_stages: int = 1
    """Blocks that a program has under way at a time in the launch with the activation, if the ranks fit into a page."""


@triton.jit
def _page_elements(page_table_ptr, place, ranks, page_stride, MAX_RANK: tl.constexpr, PAGE_RANKS: tl.constexpr):
    """Return, for each rank of an adapter, the first element of the page that it is in."""
    pages = tl.load(page_table_ptr + place * (MAX_RANK // PAGE_RANKS) + ranks // PAGE_RANKS)
    return pages.to(tl.int64) * page_stride


@triton.jit(do_not_specialize=["num_rows", "first_projection"])
def _shrink_kernel(
    x_ptr,  # [T, in], rows x_stride apart
    order_ptr,  # [T] int32
    tiles_ptr,  # [tiles, TILE_FIELDS] int32
    num_tiles_ptr,  # [2] int32
    pages_ptr,  # [pages, page_stride]
    page_table_ptr,  # [L, MAX_RANK / PAGE_RANKS] int32
    ranks_ptr,  # [L, projections of all layers] int32
    parts_ptr,  # [P, T, J, MAX_RANK] float32, written
    x_stride,
    page_stride,
    down_offset,
    num_rows,
    all_projections,
    first_projection,
    IN_FEATURES: tl.constexpr,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_FEATURES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, projection, block of ranks, part)."""
    RANK_BLOCKS: tl.constexpr = MAX_RANK // RANK_TILE
    UNITS: tl.constexpr = NUM_PROJECTIONS * RANK_BLOCKS * NUM_PARTS
    for unit in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * UNITS, tl.num_programs(0), num_stages=1):
        tile = tiles_ptr + unit // UNITS * TILE_FIELDS
        place = tl.load(tile)
        first = tl.load(tile + 1)
        count = tl.load(tile + 2)
        part = unit % NUM_PARTS
        projection = unit // NUM_PARTS % NUM_PROJECTIONS
        first_rank = unit // (NUM_PARTS * NUM_PROJECTIONS) % RANK_BLOCKS * RANK_TILE
        rank = tl.load(ranks_ptr + place * all_projections + first_projection + projection)
        rows = tl.arange(0, ROW_TILE)
        is_row = rows < count
        tokens = tl.load(order_ptr + first + rows, mask=is_row, other=0)
        ranks = first_rank + tl.arange(0, RANK_TILE)
        sources = _page_elements(page_table_ptr, place, ranks, page_stride, MAX_RANK, PAGE_RANKS) + down_offset
        sources += (projection * PAGE_RANKS + ranks % PAGE_RANKS).to(tl.int64) * IN_FEATURES
        await_kernel_before(DEPENDENT)
        if first_rank < rank:
            columns = part * PART_FEATURES + tl.arange(0, IN_TILE)
            x_rows = x_ptr + tokens.to(tl.int64) * x_stride
            low = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
            for start in range(0, PART_FEATURES, IN_TILE):
                features = start + columns
                exists = features < IN_FEATURES
                x = tl.load(x_rows[:, None] + features[None, :], mask=is_row[:, None] & exists[None, :], other=0)
                down = tl.load(
                    pages_ptr + sources[None, :] + features[:, None],
                    mask=(ranks < rank)[None, :] & exists[:, None],
                    other=0,
                )
                low = tl.dot(x, down, low, input_precision="ieee")
            targets = (part * num_rows + first + rows).to(tl.int64) * NUM_PROJECTIONS + projection
            tl.store(parts_ptr + targets[:, None] * MAX_RANK + ranks[None, :], low, mask=is_row[:, None])
    await_kernel_before(DEPENDENT)


@triton.jit
def _load_up(
    pages_ptr, page_table_ptr, place, ranks, rank, columns, exists, page_stride, up_offset,
    OUT_FEATURES: tl.constexpr, MAX_RANK: tl.constexpr, PAGE_RANKS: tl.constexpr,
):  # fmt: skip
    """Load a tile of B: [ranks, columns]."""
    sources = _page_elements(page_table_ptr, place, ranks, page_stride, MAX_RANK, PAGE_RANKS) + up_offset
    sources += (ranks % PAGE_RANKS).to(tl.int64) * OUT_FEATURES
    return tl.load(
        pages_ptr + sources[:, None] + columns[None, :], mask=(ranks < rank)[:, None] & exists[None, :], other=0
    )


@triton.jit
def _load_low(
    parts_ptr, first, rows, is_row, ranks, rank, projection, num_rows,
    NUM_PROJECTIONS: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr,
    ROW_TILE: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a tile's rows times A: [rows, ranks] float32; 0 for ranks that the adapter does not have."""
    places = (first + rows).to(tl.int64) * NUM_PROJECTIONS + projection
    exists = is_row[:, None] & (ranks < rank)[None, :]
    low = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        source = parts_ptr + part * num_rows.to(tl.int64) * (NUM_PROJECTIONS * MAX_RANK)
        low += tl.load(source + places[:, None] * MAX_RANK + ranks[None, :], mask=exists, other=0)
    return low


@triton.jit(do_not_specialize=["num_rows", "first_projection"])
def _expand_kernel(
    parts_ptr,  # [P, T, J, MAX_RANK] float32
    order_ptr,  # [T] int32
    tiles_ptr,  # [tiles, TILE_FIELDS] int32
    num_tiles_ptr,  # [2] int32
    blocks_ptr,  # [NUM_BLOCKS, BLOCK_FIELDS] int32
    pages_ptr,  # [pages, page_stride]
    page_table_ptr,  # [L, MAX_RANK / PAGE_RANKS] int32
    ranks_ptr,  # [L, projections of all layers] int32
    scales_ptr,  # [L, projections of all layers] float32
    out_ptr,  # [T, OUT_FEATURES], written
    page_stride,
    up_offset,
    num_rows,
    all_projections,
    first_projection,
    OUT_FEATURES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    FEATURE_ALIGN: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    BLOCK_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, block of features). The previous kernel is the one that shrinks; it has waited for the
    layer's product, to which this one adds."""
    for unit in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * NUM_BLOCKS, tl.num_programs(0), num_stages=1):
        tile = tiles_ptr + unit // NUM_BLOCKS * TILE_FIELDS
        block = blocks_ptr + unit % NUM_BLOCKS * BLOCK_FIELDS
        place = tl.load(tile)
        first = tl.load(tile + 1)
        count = tl.load(tile + 2)
        first_feature = tl.multiple_of(tl.load(block), FEATURE_ALIGN)
        num_features = tl.multiple_of(tl.load(block + 1), FEATURE_ALIGN)
        projection = tl.load(block + 2)
        number = place * all_projections + first_projection + projection
        rank = tl.load(ranks_ptr + number)
        if rank > 0:
            scale = tl.load(scales_ptr + number)
            rows = tl.arange(0, ROW_TILE)
            is_row = rows < count
            columns = first_feature + tl.arange(0, OUT_TILE)
            exists = tl.arange(0, OUT_TILE) < num_features
            tokens = tl.load(order_ptr + first + rows, mask=is_row, other=0)
            targets = out_ptr + tokens.to(tl.int64)[:, None] * OUT_FEATURES + columns[None, :]
            is_used = is_row[:, None] & exists[None, :]
            result = tl.load(targets, mask=is_used, other=0).to(tl.float32)
            for first_rank in tl.static_range(0, MAX_RANK, RANK_TILE):
                if first_rank < rank:
                    ranks = first_rank + tl.arange(0, RANK_TILE)
                    up = _load_up(
                        pages_ptr, page_table_ptr, place, ranks, rank, columns, exists, page_stride, up_offset,
                        OUT_FEATURES, MAX_RANK, PAGE_RANKS,
                    )  # fmt: skip
                    if first_rank == 0:
                        await_kernel_before(DEPENDENT)
                    low = _load_low(
                        parts_ptr, first, rows, is_row, ranks, MAX_RANK, projection, num_rows,
                        NUM_PROJECTIONS, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
                    )  # fmt: skip
                    result = tl.dot((low * scale).to(up.dtype), up, result, input_precision="ieee")
            tl.store(targets, result.to(out_ptr.dtype.element_ty), mask=is_used)
    await_kernel_before(DEPENDENT)


@triton.jit(do_not_specialize=["num_rows", "first_projection"])
def _expand_gated_kernel(
    parts_ptr,  # [P, T, 2, MAX_RANK] float32
    order_ptr,  # [T] int32
    tiles_ptr,  # [tiles, TILE_FIELDS] int32
    num_tiles_ptr,  # [2] int32
    pages_ptr,  # [pages, page_stride]
    page_table_ptr,  # [L, MAX_RANK / PAGE_RANKS] int32
    ranks_ptr,  # [L, projections of all layers] int32
    scales_ptr,  # [L, projections of all layers] float32
    gate_up_ptr,  # [T, 2 × SIZE]
    out_ptr,  # [T, SIZE], written
    page_stride,
    up_offset,
    num_rows,
    num_places,
    all_projections,
    first_projection,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, block of features); there are also tiles of rows without adapters. A program takes
    consecutive units: with many tiles it adds up the parts of a tile once for many blocks."""
    num_units = tl.load(num_tiles_ptr + 1) * NUM_BLOCKS
    units_each = tl.cdiv(num_units, tl.num_programs(0))
    unit = tl.program_id(0) * units_each
    end = tl.minimum(unit + units_each, num_units)
    while unit < end:
        tile = tiles_ptr + unit // NUM_BLOCKS * TILE_FIELDS
        place = tl.load(tile)
        first = tl.load(tile + 1)
        count = tl.load(tile + 2)
        first_block = unit % NUM_BLOCKS
        num_blocks = tl.minimum(NUM_BLOCKS - first_block, end - unit)
        unit += num_blocks
        has_adapter = place < num_places
        place = tl.where(has_adapter, place, 0)
        number = place * all_projections + first_projection
        gate_rank = tl.load(ranks_ptr + number, mask=has_adapter, other=0)
        up_rank = tl.load(ranks_ptr + number + 1, mask=has_adapter, other=0)
        gate_scale = tl.load(scales_ptr + number)
        up_scale = tl.load(scales_ptr + number + 1)
        rows = tl.arange(0, ROW_TILE)
        is_row = rows < count
        tokens = tl.load(order_ptr + first + rows, mask=is_row, other=0).to(tl.int64)[:, None]
        await_kernel_before(DEPENDENT)
        if MAX_RANK == RANK_TILE:
            ranks = tl.arange(0, RANK_TILE)
            gate_low = _load_low(
                parts_ptr, first, rows, is_row, ranks, gate_rank, 0, num_rows,
                2, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
            )  # fmt: skip
            up_low = _load_low(
                parts_ptr, first, rows, is_row, ranks, up_rank, 1, num_rows,
                2, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
            )  # fmt: skip
        for block in tl.range(first_block, first_block + num_blocks, num_stages=STAGES):
            columns = block * OUT_TILE + tl.arange(0, OUT_TILE)
            exists = columns < SIZE
            is_used = is_row[:, None] & exists[None, :]
            sources = gate_up_ptr + tokens * (2 * SIZE) + columns[None, :]
            gate = tl.load(sources, mask=is_used, other=0).to(tl.float32)
            up = tl.load(sources + SIZE, mask=is_used, other=0).to(tl.float32)
            for first_rank in tl.static_range(0, MAX_RANK, RANK_TILE):
                ranks = first_rank + tl.arange(0, RANK_TILE)
                if MAX_RANK == RANK_TILE or first_rank < gate_rank:
                    weight = _load_up(
                        pages_ptr, page_table_ptr, place, ranks, gate_rank, columns, exists, page_stride, up_offset,
                        2 * SIZE, MAX_RANK, PAGE_RANKS,
                    )  # fmt: skip
                    if MAX_RANK > RANK_TILE:
                        gate_low = _load_low(
                            parts_ptr, first, rows, is_row, ranks, gate_rank, 0, num_rows,
                            2, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
                        )  # fmt: skip
                    gate = tl.dot((gate_low * gate_scale).to(weight.dtype), weight, gate, input_precision="ieee")
                if MAX_RANK == RANK_TILE or first_rank < up_rank:
                    weight = _load_up(
                        pages_ptr, page_table_ptr, place, ranks, up_rank, columns + SIZE, exists, page_stride,
                        up_offset, 2 * SIZE, MAX_RANK, PAGE_RANKS,
                    )  # fmt: skip
                    if MAX_RANK > RANK_TILE:
                        up_low = _load_low(
                            parts_ptr, first, rows, is_row, ranks, up_rank, 1, num_rows,
                            2, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
                        )  # fmt: skip
                    up = tl.dot((up_low * up_scale).to(weight.dtype), weight, up, input_precision="ieee")
            result = activate(gate, GELU) * up
            tl.store(out_ptr + tokens * SIZE + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=is_used)
    await_kernel_before(DEPENDENT)


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
    _expand_kernel[_grid(len(rows.tiles) * num_blocks, launch.expand_programs, x.device)](
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
    _expand_gated_kernel[_grid(len(rows.tiles) * num_blocks, launch.expand_programs, x.device)](
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
    _shrink_kernel[_grid(units, launch.shrink_programs, x.device)](
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
