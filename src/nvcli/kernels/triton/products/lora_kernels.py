"""The kernels of LoRA adapters' low-rank products, which `lora.py` launches.

The number of tiles is known on the GPU only: a few programs per multiprocessor take one unit of work after another
until none is left. So launches in a CUDA graph serve any mix of adapters, and cost little if there are few tiles. A
program reads which tile it works on before it waits for the previous kernel: rows are grouped at the start of the step,
and between that and the first of these launches comes one that is not a dependent launch (of the embedding, or of the
rotary tables), which starts only when everything before it has ended.

Shapes: T rows, J projections of a layer, L places for adapters, P parts, R ranks that an adapter has room for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.elementwise.activation import activate
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before


@triton.jit
def _page_elements(page_table_ptr, place, ranks, page_stride, MAX_RANK: tl.constexpr, PAGE_RANKS: tl.constexpr):
    """Return, for each rank of an adapter, the first element of the page that it is in."""
    pages = tl.load(page_table_ptr + place * (MAX_RANK // PAGE_RANKS) + ranks // PAGE_RANKS)
    return pages.to(tl.int64) * page_stride


@triton.jit(do_not_specialize=["num_rows", "first_projection"])
def shrink_kernel(
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
def expand_kernel(
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


@triton.jit
def _add_products(
    values,  # [rows, columns] float32
    low,  # [rows, ranks] float32, the first ranks of the tile's rows times A
    scale, rank, half: tl.constexpr, parts_ptr, pages_ptr, page_table_ptr, place, first, rows, is_row, columns, exists,
    page_stride, up_offset, num_rows,
    SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_RANK: tl.constexpr, ROW_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr, PAGE_RANKS: tl.constexpr,
):  # fmt: skip
    """Add a tile's products with B to the columns of a gated MLP's gates (half 0), or of what these multiply (1)."""
    for first_rank in tl.static_range(0, MAX_RANK, RANK_TILE):
        if MAX_RANK == RANK_TILE or first_rank < rank:
            ranks = first_rank + tl.arange(0, RANK_TILE)
            weight = _load_up(
                pages_ptr, page_table_ptr, place, ranks, rank, columns + half * SIZE, exists, page_stride, up_offset,
                2 * SIZE, MAX_RANK, PAGE_RANKS,
            )  # fmt: skip
            if first_rank > 0:
                low = _load_low(
                    parts_ptr, first, rows, is_row, ranks, rank, half, num_rows,
                    2, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE,
                )  # fmt: skip
            values = tl.dot((low * scale).to(weight.dtype), weight, values, input_precision="ieee")
    return values


@triton.jit(do_not_specialize=["num_rows", "first_projection"])
def expand_gated_kernel(
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
        gate_scale = tl.load(scales_ptr + number, mask=has_adapter, other=0)
        up_scale = tl.load(scales_ptr + number + 1, mask=has_adapter, other=0)
        rows = tl.arange(0, ROW_TILE)
        is_row = rows < count
        tokens = tl.load(order_ptr + first + rows, mask=is_row, other=0).to(tl.int64)[:, None]
        await_kernel_before(DEPENDENT)
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
            gate = _add_products(
                gate, gate_low, gate_scale, gate_rank, 0, parts_ptr, pages_ptr, page_table_ptr, place, first, rows,
                is_row, columns, exists, page_stride, up_offset, num_rows,
                SIZE, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE, PAGE_RANKS,
            )  # fmt: skip
            up = _add_products(
                up, up_low, up_scale, up_rank, 1, parts_ptr, pages_ptr, page_table_ptr, place, first, rows,
                is_row, columns, exists, page_stride, up_offset, num_rows,
                SIZE, NUM_PARTS, MAX_RANK, ROW_TILE, RANK_TILE, PAGE_RANKS,
            )  # fmt: skip
            result = activate(gate, GELU) * up
            tl.store(out_ptr + tokens * SIZE + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=is_used)
    await_kernel_before(DEPENDENT)
