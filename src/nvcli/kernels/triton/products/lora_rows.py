"""Sorts a step's rows by LoRA adapter on the GPU and splits them into tiles for the products: see `nvcli.kernels.lora`.

Every program looks at all rows and writes those of its own adapter. Their position follows from how many rows have
adapters in earlier places, so no program waits for another. The last program writes the rows without an adapter, which
come last. Neither kernel is a dependent launch, because the products read the sorted rows before they wait (`lora.py`).

Shapes: T tokens, R rows, L places for adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.core.messages import NO_ADAPTER
from nvcli.kernels.lora_types import TILE_FIELDS, AdapterRows
from nvcli.kernels.whole_numbers import next_power_of_2

_FEW_ROWS = 1024
"""Maximum rows with which a tile has `_FEW_ROWS_TILE` rows: decode steps, in which an adapter has few."""
_FEW_ROWS_TILE, _ROW_TILE = 16, 64
_TOKENS_AT_ONCE = 256
_ROWS_AT_ONCE = 1024


@triton.jit
def _spread_kernel(
    adapters_of_slots_ptr,  # [slots] int32
    slots_ptr,  # [R] int32
    starts_ptr,  # [R + 1] int32
    out_ptr,  # [T] int32, written
    TOKENS: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    adapter = tl.load(adapters_of_slots_ptr + tl.load(slots_ptr + row))
    for first in range(start, end, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        tl.store(out_ptr + tokens, tl.zeros([TOKENS], tl.int32) + adapter, mask=tokens < end)


@triton.jit
def _load_places(adapters_ptr, rows, num_rows, NUM_PLACES: tl.constexpr, NO_ADAPTER: tl.constexpr):
    """Load the place of each row's adapter, counted from 0; NUM_PLACES: it has none; NUM_PLACES + 1: there is no such
    row."""
    adapters = tl.load(adapters_ptr + rows, mask=rows < num_rows, other=NO_ADAPTER)
    places = tl.where(adapters == NO_ADAPTER, NUM_PLACES, adapters - 1)
    return tl.where(rows < num_rows, places, NUM_PLACES + 1)


@triton.jit(do_not_specialize=["num_rows"])
def _group_kernel(
    adapters_ptr,  # [T] int32
    order_ptr,  # [T] int32, written
    tiles_ptr,  # [tiles, TILE_FIELDS] int32, written
    num_tiles_ptr,  # [2] int32, written
    num_rows,
    NUM_PLACES: tl.constexpr,
    BINS: tl.constexpr,  # at least NUM_PLACES + 2
    ROW_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    NO_ADAPTER: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    """Program (place); the last one is for the rows without an adapter."""
    place = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        counts += tl.histogram(_load_places(adapters_ptr, rows, num_rows, NUM_PLACES, NO_ADAPTER), BINS)
    bins = tl.arange(0, BINS)
    num_tiles = (counts + ROW_TILE - 1) // ROW_TILE
    first_row = tl.sum(tl.where(bins < place, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < place, num_tiles, 0), 0)
    count = tl.sum(tl.where(bins == place, counts, 0), 0)
    if place == NUM_PLACES:
        tl.store(num_tiles_ptr, first_tile)
        tl.store(num_tiles_ptr + 1, first_tile + (count + ROW_TILE - 1) // ROW_TILE)
    if count > 0:
        target = first_row
        for start in range(0, num_rows, ROWS):
            rows = start + tl.arange(0, ROWS)
            is_mine = (_load_places(adapters_ptr, rows, num_rows, NUM_PLACES, NO_ADAPTER) == place).to(tl.int32)
            tl.store(order_ptr + target + tl.cumsum(is_mine, 0) - is_mine, rows, mask=is_mine > 0)
            target += tl.sum(is_mine, 0)
        fields = tl.arange(0, TILE_FIELDS)
        for done in range(0, count, ROW_TILE):
            held = tl.minimum(count - done, ROW_TILE)
            tile = tl.where(fields == 0, place, tl.where(fields == 1, first_row + done, held))
            tl.store(tiles_ptr + (first_tile + done // ROW_TILE) * TILE_FIELDS + fields, tile)


def spread_adapters(adapters_of_slots: Tensor, slots: Tensor, query_start_loc: Tensor, out: Tensor) -> None:
    """See `nvcli.kernels.lora.spread_adapters`."""
    _spread_kernel[(len(slots),)](
        adapters_of_slots,
        slots,
        query_start_loc,
        out,
        TOKENS=_TOKENS_AT_ONCE,
        num_warps=1,
    )


def group_rows(adapters: Tensor, num_places: int, *, batch_invariant: bool = False) -> AdapterRows:
    """See `nvcli.kernels.lora.group_rows`."""
    num_rows = len(adapters)
    row_tile = _FEW_ROWS_TILE if num_rows <= _FEW_ROWS or batch_invariant else _ROW_TILE
    most_tiles = num_rows // row_tile + min(num_places + 1, num_rows)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=adapters.device)

    rows = AdapterRows(
        adapters=adapters,
        order=ints(num_rows),
        tiles=ints(most_tiles, TILE_FIELDS),
        num_tiles=ints(2),
        row_tile=row_tile,
        batch_invariant=batch_invariant,
    )
    _group_kernel[(num_places + 1,)](
        adapters,
        rows.order,
        rows.tiles,
        rows.num_tiles,
        num_rows,
        NUM_PLACES=num_places,
        BINS=next_power_of_2(num_places + 2),
        ROW_TILE=row_tile,
        ROWS=min(_ROWS_AT_ONCE, next_power_of_2(num_rows)),
        NO_ADAPTER=NO_ADAPTER,
        TILE_FIELDS=TILE_FIELDS,
        num_warps=4,
    )
    return rows
