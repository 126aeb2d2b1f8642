"""The kernels of LoRA adapters' low-rank products, which `lora.py` launches; the one with an activation is in
`lora_gated_kernel.py`.

The number of tiles is known on the GPU only: a few programs per multiprocessor take one *unit* of work after another
until none is left. So launches in a CUDA graph serve any mix of adapters, and cost little if there are few tiles.
Between two layers so many weights are read that whatever the kernels read of tiles has left the L2 cache, so a program
reads all of it at once: that of its first unit before it knows whether there is such a unit, and that of the next one
before it works on a unit. A program also reads it before it waits for the previous kernel: rows are grouped at the
start of the step, and between that and the first of these launches comes one that is not a dependent launch (of the
embedding, or of the rotary tables), which starts only when everything before it has ended.

Shapes: T rows, S rows of all tiles, full or not, J projections of a layer, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.lora_types import BLOCK_FIELDS
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before

_PAGE_RANKS, _BLOCK_FIELDS = tl.constexpr(PAGE_RANKS), tl.constexpr(BLOCK_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankKind:
    """The constants that the products of a layer have in common. Kernels take it as one constant."""

    num_projections: int
    num_parts: int
    max_rank: int
    row_tile: int
    rank_tile: int
    """Ranks that a program multiplies by at a time."""

    @property
    def rank_blocks(self) -> int:
        """How often the ranks that an adapter has room for fill `rank_tile`."""
        return self.max_rank // self.rank_tile


@triton.jit
def load_pages(tiles, tile, first_rank, KIND: tl.constexpr):
    """Load the page that each of some ranks of a tile's adapter is in."""
    ranks = first_rank + tl.arange(0, KIND.rank_tile)
    return tl.load(tiles.pages + tile * (KIND.max_rank // _PAGE_RANKS) + ranks // _PAGE_RANKS)


@triton.jit
def load_rows(tiles, tile, ROW_TILE: tl.constexpr):
    """Load the number of rows of a tile, and the rows, which are undefined past that number."""
    return tl.load(tiles.counts + tile), tl.load(tiles.order + tile * ROW_TILE + tl.arange(0, ROW_TILE))


@triton.jit
def load_down(
    pages_ptr, pages, projection, ranks, rank, columns, exists, page_stride, down_offset, IN_FEATURES: tl.constexpr
):
    """Load a tile of A: [columns, ranks]. pages: the page of each rank."""
    sources = pages.to(tl.int64) * page_stride + down_offset
    sources += (projection * _PAGE_RANKS + ranks % _PAGE_RANKS).to(tl.int64) * IN_FEATURES
    is_used = (ranks < rank)[None, :] & exists[:, None]
    return tl.load(pages_ptr + sources[None, :] + columns[:, None], mask=is_used, other=0)


@triton.jit
def load_up(pages_ptr, pages, ranks, rank, columns, exists, page_stride, up_offset, OUT_FEATURES: tl.constexpr):
    """Load a tile of B: [ranks, columns]. pages: the page of each rank."""
    sources = pages.to(tl.int64) * page_stride + up_offset + (ranks % _PAGE_RANKS).to(tl.int64) * OUT_FEATURES
    is_used = (ranks < rank)[:, None] & exists[None, :]
    return tl.load(pages_ptr + sources[:, None] + columns[None, :], mask=is_used, other=0)


@triton.jit
def _load_shrink_unit(tiles, unit, all_projections, first_projection, KIND: tl.constexpr):
    tile = unit // (KIND.num_parts * KIND.num_projections * KIND.rank_blocks)
    projection = unit // KIND.num_parts % KIND.num_projections
    first_rank = unit // (KIND.num_parts * KIND.num_projections) % KIND.rank_blocks * KIND.rank_tile
    count, tokens = load_rows(tiles, tile, KIND.row_tile)
    pages = load_pages(tiles, tile, first_rank, KIND)
    return count, tokens, pages, tl.load(tiles.ranks + tile * all_projections + first_projection + projection)


@triton.jit(do_not_specialize=["num_slots", "all_projections", "first_projection"])
def shrink_kernel(
    x_ptr,  # [T, in], rows x_stride apart
    tiles,  # `AdapterTiles`
    pages_ptr,  # [pages, page_stride]
    parts_ptr,  # [P, S, J, R] float32, written
    x_stride,
    page_stride,
    down_offset,
    num_slots,
    all_projections,
    first_projection,
    IN_FEATURES: tl.constexpr,
    PART_FEATURES: tl.constexpr,
    IN_TILE: tl.constexpr,
    KIND: tl.constexpr,  # `LowRankKind`
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, projection, block of ranks, part)."""
    ROW_TILE: tl.constexpr = KIND.row_tile
    RANK_TILE: tl.constexpr = KIND.rank_tile
    UNITS: tl.constexpr = KIND.num_projections * KIND.rank_blocks * KIND.num_parts
    num_units = tl.load(tiles.num_tiles) * UNITS
    unit = tl.program_id(0)
    work = _load_shrink_unit(tiles, unit, all_projections, first_projection, KIND)
    rows = tl.arange(0, KIND.row_tile)
    while unit < num_units:
        next_unit = unit + tl.num_programs(0)
        next_work = _load_shrink_unit(
            tiles, tl.minimum(next_unit, num_units - 1), all_projections, first_projection, KIND
        )
        count, tokens, pages, rank = work
        tile = unit // UNITS
        part = unit % KIND.num_parts
        projection = unit // KIND.num_parts % KIND.num_projections
        first_rank = unit // (KIND.num_parts * KIND.num_projections) % KIND.rank_blocks * KIND.rank_tile
        is_row = rows < count
        ranks = first_rank + tl.arange(0, KIND.rank_tile)
        await_kernel_before(DEPENDENT)
        if first_rank < rank:
            columns = part * PART_FEATURES + tl.arange(0, IN_TILE)
            x_rows = x_ptr + tokens.to(tl.int64) * x_stride
            low = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
            for start in range(0, PART_FEATURES, IN_TILE):
                features = start + columns
                exists = features < IN_FEATURES
                x = tl.load(x_rows[:, None] + features[None, :], mask=is_row[:, None] & exists[None, :], other=0)
                down = load_down(
                    pages_ptr, pages, projection, ranks, rank, features, exists, page_stride, down_offset, IN_FEATURES
                )
                low = tl.dot(x, down, low, input_precision="ieee")
            slots = (part * num_slots + tile * KIND.row_tile + rows).to(tl.int64)
            targets = slots * KIND.num_projections + projection
            tl.store(parts_ptr + targets[:, None] * KIND.max_rank + ranks[None, :], low, mask=is_row[:, None])
        work = next_work
        unit = next_unit
    await_kernel_before(DEPENDENT)


@triton.jit
def load_low(parts_ptr, tile, is_row, ranks, rank, projection, num_slots, KIND: tl.constexpr):
    """Add up the parts of a tile's rows times A: [rows, ranks] float32; 0 for ranks that the adapter does not have."""
    ROW_TILE: tl.constexpr = KIND.row_tile
    RANK_TILE: tl.constexpr = KIND.rank_tile
    NUM_PARTS: tl.constexpr = KIND.num_parts
    slots = (tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    places = slots * KIND.num_projections + projection
    exists = is_row[:, None] & (ranks < rank)[None, :]
    low = tl.zeros([ROW_TILE, RANK_TILE], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        source = parts_ptr + part * num_slots.to(tl.int64) * (KIND.num_projections * KIND.max_rank)
        low += tl.load(source + places[:, None] * KIND.max_rank + ranks[None, :], mask=exists, other=0)
    return low


@triton.jit
def _load_expand_unit(
    tiles, blocks_ptr, unit, all_projections, first_projection, NUM_BLOCKS: tl.constexpr, KIND: tl.constexpr
):
    tile = unit // NUM_BLOCKS
    block = blocks_ptr + unit % NUM_BLOCKS * _BLOCK_FIELDS
    count, tokens = load_rows(tiles, tile, KIND.row_tile)
    pages = load_pages(tiles, tile, 0, KIND)
    projection = tl.load(block + 2)
    number = tile * all_projections + first_projection + projection
    rank = tl.load(tiles.ranks + number)
    scale = tl.load(tiles.scales + number)
    return count, tokens, pages, tl.load(block), tl.load(block + 1), projection, rank, scale


@triton.jit(do_not_specialize=["num_slots", "all_projections", "first_projection"])
def expand_kernel(
    parts_ptr,  # [P, S, J, R] float32
    tiles,  # `AdapterTiles`
    blocks_ptr,  # [NUM_BLOCKS, BLOCK_FIELDS] int32
    pages_ptr,  # [pages, page_stride]
    out_ptr,  # [T, OUT_FEATURES], written
    page_stride,
    up_offset,
    num_slots,
    all_projections,
    first_projection,
    OUT_FEATURES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    FEATURE_ALIGN: tl.constexpr,
    KIND: tl.constexpr,  # `LowRankKind`
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, OUT_TILE features of a block). The previous kernel is the one that shrinks; it has
    waited for the layer's product, to which this one adds."""
    MAX_RANK: tl.constexpr = KIND.max_rank
    RANK_TILE: tl.constexpr = KIND.rank_tile
    num_units = tl.load(tiles.num_tiles) * NUM_BLOCKS
    unit = tl.program_id(0)
    work = _load_expand_unit(tiles, blocks_ptr, unit, all_projections, first_projection, NUM_BLOCKS, KIND)
    while unit < num_units:
        next_unit = unit + tl.num_programs(0)
        following = tl.minimum(next_unit, num_units - 1)
        next_work = _load_expand_unit(tiles, blocks_ptr, following, all_projections, first_projection, NUM_BLOCKS, KIND)
        count, tokens, pages, first_feature, num_features, projection, rank, scale = work
        if rank > 0:
            tile = unit // NUM_BLOCKS
            is_row = tl.arange(0, KIND.row_tile) < count
            # The factors tell the compiler how values are aligned, which are carried from unit to unit.
            columns = first_feature // FEATURE_ALIGN * FEATURE_ALIGN + tl.arange(0, OUT_TILE)
            exists = tl.arange(0, OUT_TILE) < num_features // FEATURE_ALIGN * FEATURE_ALIGN
            targets = out_ptr + tokens.to(tl.int64)[:, None] * OUT_FEATURES + columns[None, :]
            is_used = is_row[:, None] & exists[None, :]
            ranks = tl.arange(0, KIND.rank_tile)
            up = load_up(pages_ptr, pages, ranks, rank, columns, exists, page_stride, up_offset, OUT_FEATURES)
            result = tl.load(targets, mask=is_used, other=0).to(tl.float32)
            await_kernel_before(DEPENDENT)
            low = load_low(parts_ptr, tile, is_row, ranks, KIND.max_rank, projection, num_slots, KIND)
            result = tl.dot((low * scale).to(up.dtype), up, result, input_precision="ieee")
            for first_rank in tl.static_range(RANK_TILE, MAX_RANK, RANK_TILE):
                if first_rank < rank:
                    more_ranks = first_rank + ranks
                    more_pages = load_pages(tiles, tile, first_rank, KIND)
                    up = load_up(
                        pages_ptr, more_pages, more_ranks, rank, columns, exists, page_stride, up_offset, OUT_FEATURES
                    )
                    low = load_low(parts_ptr, tile, is_row, more_ranks, KIND.max_rank, projection, num_slots, KIND)
                    result = tl.dot((low * scale).to(up.dtype), up, result, input_precision="ieee")
            tl.store(targets, result.to(out_ptr.dtype.element_ty), mask=is_used)
        work = next_work
        unit = next_unit
    await_kernel_before(DEPENDENT)
