"""16-bit copies of an FP8 cache's keys and values, made for the prefill chunks of one layer at a time, so that the
16-bit kernel (`hopper_prefill_kernel.py`) can attend to them.

That kernel reads each key once for every tile of queries, and converting it each time would take longer than the
products. The scratch has a fixed size and is divided into units of 64 keys. The units of a request are consecutive, so
its block table is a range that begins with its first unit. The units are planned on the GPU once a step, from the list
of tiles and without host values: chunks at the head of the list, those of the longest requests, get units as long as
there are any. A kernel that reads the cache itself attends the rest of the list.

A copy is a code times its scale. The product has up to 12 significant bits and is rounded to bfloat16's 8, an error of
at most 2^-8, as for any number that a bfloat16 cache keeps; rounding to e4m3 has cost up to 2^-4 before. float16 keeps
11 bits but lacks the range.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS, store_item
from nvcli.kernels.triton.attention.attention_launch import AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.fp8_kv import scale_pointers
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_tiles import Chunks, PrefillTiles, TileKey, TileList, read_tile

UNIT = tl.constexpr(64)
"""Keys of a unit."""
_TILES = tl.constexpr(1024)
"""Tiles that the planning kernel adds up at a time."""
_LANES = tl.constexpr(128)
"""Units that a program lists at a time."""
_ROWS = tl.constexpr(64)
"""Tokens × heads that a program copies at a time, for keys and for values."""
_PROGRAMS = 2112
"""Programs that copy: 16 for each multiprocessor of an H200."""


@triton.jit
def plan_scratch_kernel(
    tiles,  # [capacity, ITEM_FIELDS] int32
    num_tiles,  # [1] int32
    copied_tiles,  # the same with the first unit in place of the slot, written for chunks that find room
    num_copied,  # [1] int32, written: the tiles of these chunks
    num_units,  # [1] int32, written: the units of their keys
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_UNITS: tl.constexpr,
):
    """One program. The tiles of a chunk are consecutive in the list, its last rows first."""
    end = tl.load(num_tiles)
    units = 0
    copied = 0
    copied_units = 0
    for first in range(0, end, _TILES):
        index = first + tl.arange(0, _TILES)
        is_tile = index < end
        _, first_row, first_token, num_tokens, num_keys = read_tile(tiles, index, is_tile)
        own_units = tl.cdiv(num_keys, UNIT)
        begins_chunk = is_tile & (first_row + ROWS >= num_tokens * GROUP)
        units_so_far = units + tl.cumsum(tl.where(begins_chunk, own_units, 0), 0)
        finds_room = is_tile & (units_so_far <= MAX_UNITS)
        copy = copied_tiles + index * ITEM_FIELDS
        # Padding has no units, and must not read behind the table's end.
        first_unit = tl.where(num_keys > 0, units_so_far - own_units, 0)
        store_item(copy, (first_unit, first_row, first_token, num_tokens, num_keys), finds_room)
        units = tl.max(units_so_far, 0)
        copied += tl.sum(finds_room.to(tl.int32), 0)
        copied_units = tl.maximum(copied_units, tl.max(tl.where(finds_room, units_so_far, 0), 0))
    tl.store(num_copied, copied)
    tl.store(num_units, copied_units)


@triton.jit
def list_units_kernel(
    tiles,  # [capacity, ITEM_FIELDS] int32
    copied_tiles,  # [capacity, ITEM_FIELDS] int32, of `plan_scratch_kernel`
    num_copied,  # [1] int32
    units,  # [MAX_UNITS, 2] int32, written: the slot whose keys a unit holds, and which unit of them
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (tile): the first tile of a chunk lists its units."""
    index = tl.program_id(0)
    slot, first_row, _, num_tokens, num_keys = read_tile(tiles, index)
    own_units = tl.cdiv(num_keys, UNIT)
    first_unit = tl.load(copied_tiles + index * ITEM_FIELDS)
    if index < tl.load(num_copied) and first_row + ROWS >= num_tokens * GROUP:
        for first in range(0, own_units, _LANES):
            unit = first + tl.arange(0, _LANES)
            entry = units + (first_unit + unit) * 2
            store_item(entry, (slot, unit), unit < own_units)


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def fill_scratch_kernel(
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D] e4m3, each block's scales behind it
    v_cache,
    k_scratch,  # [MAX_UNITS, UNIT, KV, D], written
    v_scratch,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    units,  # [MAX_UNITS, 2] int32
    num_units,  # [1] int32
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Programs take the units in turn, a part of the tokens and heads at a time."""
    PARTS: tl.constexpr = UNIT * NUM_KV_HEADS // _ROWS
    rows = tl.arange(0, _ROWS)
    dims = tl.arange(0, HEAD_DIM)
    for item in range(tl.program_id(0), tl.load(num_units) * PARTS, tl.num_programs(0)):
        unit = item // PARTS
        slot = tl.load(units + unit * 2).to(tl.int64)
        start = tl.load(units + unit * 2 + 1) * UNIT
        block = tl.load(block_tables + slot * block_table_stride + start // BLOCK_SIZE).to(tl.int64)
        row = (item - unit * PARTS) * _ROWS + rows
        place = (block * BLOCK_STRIDE + start % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)) + row * HEAD_DIM
        places = place[:, None] + dims[None, :]
        keys = tl.load(k_cache + places)
        values = tl.load(v_cache + places)
        offset, head = start % BLOCK_SIZE + row // NUM_KV_HEADS, row % NUM_KV_HEADS
        k_scales = scale_pointers(k_cache, block, offset, head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE)
        v_scales = scale_pointers(v_cache, block, offset, head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE)
        k_scale = tl.load(k_scales).to(tl.float32)
        v_scale = tl.load(v_scales).to(tl.float32)
        target = unit.to(tl.int64) * (UNIT * NUM_KV_HEADS * HEAD_DIM) + row * HEAD_DIM
        targets = target[:, None] + dims[None, :]
        tl.store(k_scratch + targets, (keys.to(tl.float32) * k_scale[:, None]).to(k_scratch.dtype.element_ty))
        tl.store(v_scratch + targets, (values.to(tl.float32) * v_scale[:, None]).to(v_scratch.dtype.element_ty))


class ScratchTiles(PrefillTiles):
    """The tiles of a step; the first `num_before` of them attend to copies in a scratch. The arguments are those of
    `PrefillTiles`."""

    def __init__(self, key: TileKey, *, max_tokens: int, max_chunks: int, device: torch.device) -> None:
        super().__init__(key._replace(is_sorted=False), max_tokens=max_tokens, max_chunks=max_chunks, device=device)
        self._num_units = key.scratch_units
        counts = torch.zeros(2, dtype=torch.int32, device=device)
        self.num_before, self.num_units = counts[:1], counts[1:]
        self.units = torch.zeros(key.scratch_units, 2, dtype=torch.int32, device=device)
        """[scratch_units, 2] int32: the slot whose keys each unit holds, and the unit's number in its request."""
        self.copied = TileList(torch.zeros_like(self.items), counts[:1])
        """The tiles that attend to copies, those that see most keys first. A request's first unit stands in place of
        its slot."""
        self._copied_by_chunks = torch.zeros_like(self.items)

    def plan(self, chunks: Chunks) -> None:
        super().plan(chunks)
        self.copied.capacity = self.capacity
        plan_scratch_kernel[(1,)](
            self.items,
            self.num_items,
            self._copied_by_chunks,
            self.copied.num_items,
            self.num_units,
            GROUP=self._group,
            ROWS=self._rows,
            MAX_UNITS=self._num_units,
        )
        list_units_kernel[(self.capacity,)](
            self.items,
            self._copied_by_chunks,
            self.copied.num_items,
            self.units,
            GROUP=self._group,
            ROWS=self._rows,
            num_warps=1,
        )
        self._sort(self._copied_by_chunks, self.copied)


class ScratchPrefillAttention:
    """Prefill attention of one geometry without windows over an FP8 cache; `PrefillAttention` describes the methods.

    Each layer copies the keys and values that its chunks see to a scratch of `scratch_tokens`, a multiple of 64, in the
    model's type. Hopper's kernel attends to the copies. Chunks whose keys do not fit are attended by the kernel of
    `prefill_attention.py`, which reads the cache itself.
    """

    def __init__(self, shape: AttentionShape, *, scratch_tokens: int) -> None:
        self._shape, self._num_units = shape, scratch_tokens // UNIT.value
        assert shape.block_size % UNIT.value == 0
        size = (2, self._num_units, UNIT.value, shape.num_kv_heads, shape.head_dim)
        # Zeros, not empty: a masked value is multiplied by 0, and 0 × NaN is NaN.
        self._k, self._v = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        # The block table of a request begins at its first unit.
        self._block_table = torch.arange(self._num_units, dtype=torch.int32, device=shape.device)
        self._copies = PrefillAttention(replace(shape, block_size=UNIT.value, kv_dtype=shape.dtype), PrefillKind.HOPPER)
        self._rest = PrefillAttention(shape)
        assert self._copies.tile_key[:2] == self._rest.tile_key[:2], "they share tiles"

    @property
    def tile_key(self) -> TileKey:
        """The key of its tile lists, which are `ScratchTiles`."""
        return self._copies.tile_key._replace(scratch_units=self._num_units)

    def run(self, layer: LayerInputs, tiles: PrefillTiles, out: Tensor, log_sums: Tensor | None = None) -> None:
        """Attend the tiles, which are `ScratchTiles`, as `PrefillAttention.run` does; there is no window."""
        assert isinstance(tiles, ScratchTiles)
        shape, tables = self._shape, layer.block_tables
        fill_scratch_kernel[(min(self._num_units * shape.num_kv_heads, _PROGRAMS),)](
            layer.k_cache,
            layer.v_cache,
            self._k,
            self._v,
            tables,
            tiles.units,
            tiles.num_units,
            tables.stride(0),
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            BLOCK_STRIDE=layer.k_cache.stride(0),
        )
        copies = layer._replace(k_cache=self._k, v_cache=self._v, block_tables=self._block_table)
        self._copies.run(copies, tiles.copied, out)
        self._rest.run(layer, tiles, out)
