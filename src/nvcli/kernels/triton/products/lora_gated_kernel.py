"""The launch of LoRA adapters' low-rank products that computes a gated MLP's activation, too: see `lora_kernels.py`.

Shapes as there; SIZE features of the gates, and as many of what they multiply.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.elementwise.activation import activate
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before
from nvcli.kernels.triton.products.lora_kernels import load_low, load_pages, load_rows, load_up


@triton.jit
def _add_products(
    values,  # [rows, columns] float32
    low,  # [rows, ranks] float32, the first ranks of the tile's rows times A
    scale, rank, half: tl.constexpr, parts_ptr, pages_ptr, pages, tiles, tile, is_row, columns, exists,
    page_stride, up_offset, num_slots, SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add a tile's products with B to the columns of a gated MLP's gates (half 0), or of what these multiply (1)."""
    MAX_RANK: tl.constexpr = KIND.max_rank
    RANK_TILE: tl.constexpr = KIND.rank_tile
    for first_rank in tl.static_range(0, MAX_RANK, RANK_TILE):
        if MAX_RANK == RANK_TILE or first_rank < rank:
            ranks = first_rank + tl.arange(0, RANK_TILE)
            if first_rank > 0:
                pages = load_pages(tiles, tile, first_rank, KIND)
                low = load_low(parts_ptr, tile, is_row, ranks, rank, half, num_slots, KIND)
            weight = load_up(
                pages_ptr, pages, ranks, rank, columns + half * SIZE, exists, page_stride, up_offset, 2 * SIZE
            )
            values = tl.dot((low * scale).to(weight.dtype), weight, values, input_precision="ieee")
    return values


@triton.jit(do_not_specialize=["num_slots", "all_projections", "first_projection"])
def expand_gated_kernel(
    parts_ptr,  # [P, S, 2, R] float32
    tiles,  # `AdapterTiles`
    pages_ptr,  # [pages, page_stride]
    gate_up_ptr,  # [T, 2 × SIZE]
    out_ptr,  # [T, SIZE], written
    page_stride,
    up_offset,
    num_slots,
    all_projections,
    first_projection,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    KIND: tl.constexpr,  # `LowRankKind`
    DEPENDENT: tl.constexpr,
):
    """A unit of work is (tile, block of features); there are also tiles of rows without adapters. A program takes
    consecutive units: with many tiles it adds up the parts of a tile once for many blocks."""
    num_units = tl.load(tiles.num_tiles + 1) * NUM_BLOCKS
    units_each = tl.cdiv(num_units, tl.num_programs(0))
    unit = tl.program_id(0) * units_each
    end = tl.minimum(unit + units_each, num_units)
    while unit < end:
        tile = unit // NUM_BLOCKS
        first_block = unit % NUM_BLOCKS
        num_blocks = tl.minimum(NUM_BLOCKS - first_block, end - unit)
        unit += num_blocks
        count, order = load_rows(tiles, tile, KIND.row_tile)
        pages = load_pages(tiles, tile, 0, KIND)
        number = tile * all_projections + first_projection
        gate_rank = tl.load(tiles.ranks + number)
        up_rank = tl.load(tiles.ranks + number + 1)
        gate_scale = tl.load(tiles.scales + number)
        up_scale = tl.load(tiles.scales + number + 1)
        is_row = tl.arange(0, KIND.row_tile) < count
        tokens = tl.where(is_row, order, 0).to(tl.int64)[:, None]
        await_kernel_before(DEPENDENT)
        ranks = tl.arange(0, KIND.rank_tile)
        gate_low = load_low(parts_ptr, tile, is_row, ranks, gate_rank, 0, num_slots, KIND)
        up_low = load_low(parts_ptr, tile, is_row, ranks, up_rank, 1, num_slots, KIND)
        for block in tl.range(first_block, first_block + num_blocks, num_stages=STAGES):
            columns = block * OUT_TILE + tl.arange(0, OUT_TILE)
            exists = columns < SIZE
            is_used = is_row[:, None] & exists[None, :]
            sources = gate_up_ptr + tokens * (2 * SIZE) + columns[None, :]
            gate = tl.load(sources, mask=is_used, other=0).to(tl.float32)
            up = tl.load(sources + SIZE, mask=is_used, other=0).to(tl.float32)
            gate = _add_products(
                gate, gate_low, gate_scale, gate_rank, 0, parts_ptr, pages_ptr, pages, tiles, tile, is_row, columns,
                exists, page_stride, up_offset, num_slots, SIZE, KIND,
            )  # fmt: skip
            up = _add_products(
                up, up_low, up_scale, up_rank, 1, parts_ptr, pages_ptr, pages, tiles, tile, is_row, columns,
                exists, page_stride, up_offset, num_slots, SIZE, KIND,
            )  # fmt: skip
            result = activate(gate, GELU) * up
            tl.store(out_ptr + tokens * SIZE + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=is_used)
    await_kernel_before(DEPENDENT)
