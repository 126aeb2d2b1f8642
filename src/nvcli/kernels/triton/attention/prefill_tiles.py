"""The work list of paged prefill attention: tiles of the chunks' queries, listed on the GPU once a step.

A tile is a number of rows of one chunk: with G query heads for each KV head, row r of a chunk is head r % G of token
r // G. Tiles of longer requests come first, and within a chunk the last tile, which sees the most keys: what one tile
reads, the next finds in the L2 cache. Nothing depends on host values but the batch's shape, so that a launch captured
in a CUDA graph serves any chunks. Tokens behind the last chunk's, which pad a graph, are listed as tiles without keys.

A list may be sorted by how many keys a tile sees, for kernels whose programs share it out in turns, each as many tiles
as any other (`hopper_prefill_kernel.py`). Their turns are equally long only if neighbours of the list take equally
long. If a tile costs as much as 512 keys beside those that it sees, then with eight prompts of 1,024 tokens, 32 query
heads and 8 KV heads, listed by chunks, the busiest of 132 programs has 31 % more to do than the mean, and 3 % with
tiles by their keys.

In a step whose chunks share prefixes there are three lists more. That of the prefixes takes the chunks of a group for
one chunk: their tokens stand side by side in the batch, so a tile has rows of several requests. That of the rests has
these chunks' own tiles, with the keys behind the prefixes. The last one has the other chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chunk_prefixes import ChunkPrefixes
from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS, store_item

_COLUMNS = tl.constexpr(256)
"""The chunks with which a planning program compares its own at a time."""
_LANES = tl.constexpr(128)
"""The tiles that it stores at a time."""
_SORT_KEYS = tl.constexpr(128)
"""Tiles whose keys fill the same number of groups of this size count as equally long, and keep their order."""
_SORT_LANES = tl.constexpr(16)
"""Tiles that a program of the sorting kernel places."""
_SORT_COLUMNS = tl.constexpr(1024)
"""The tiles with which it compares them at a time."""


class TilePart(Enum):
    """The keys that the tiles of a list attend to."""

    WHOLE = 0
    """All keys that each token sees."""
    PREFIX = 1
    """The whole prefix that a group of chunks shares, for each of their tokens."""
    REST = 2
    """The keys behind the prefix that a chunk shares."""
    OTHERS = 3
    """All keys that each token sees, in chunks that share no prefix."""


@triton.jit
def read_tile(tiles, index, is_tile=None):
    """Return the slot, the first row, the chunk's first token and its number of tokens, and the request's keys; zeros
    where `is_tile` is given and false."""
    tile = tiles + index * ITEM_FIELDS
    other: tl.constexpr = None if is_tile is None else 0
    slot = tl.load(tile, is_tile, other)
    first_row = tl.load(tile + 1, is_tile, other)
    first_token = tl.load(tile + 2, is_tile, other)
    num_tokens = tl.load(tile + 3, is_tile, other)
    return slot, first_row, first_token, num_tokens, tl.load(tile + 4, is_tile, other)


@triton.jit(
    do_not_specialize=["first_chunk", "num_chunks", "num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "slots", "prefix_ends", "group_ends"],
)
def plan_prefill_kernel(
    query_start_loc,  # [R + 1] int32, first token of each row of the batch
    seq_lens,  # [R] int32, keys of each row's request, the chunk's own included
    slots,  # [R] int64
    # [capacity, ITEM_FIELDS] int32, written: the request's slot, the tile's first row in the chunk, the chunk's first
    # token, its number of tokens, keys of the request (0: attend to nothing), first key to attend to (of rests)
    tiles,
    num_tiles,  # [1] int32, written
    prefix_ends,  # [R] int32, keys of the prefix that each row shares; None: the list is of all chunks
    group_ends,  # [R] int32, `ChunkPrefixes.group_ends`; None: the list is not of prefixes
    first_chunk,  # the row of the batch that is the first chunk
    num_chunks,
    num_tokens,  # of all chunks, padding included
    IS_REST: tl.constexpr,  # the list is of rests
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program i lists the tiles of chunk i, behind those of all chunks of longer requests, ties by number; the program
    behind the last chunk's lists the padding tokens, in lists of the whole and of others. In a list of prefixes a group
    stands in the place of its first chunk. Chunks that are not listed have no tokens."""
    chunk = tl.program_id(0)
    is_chunk = chunk < num_chunks
    query_start_loc += first_chunk
    seq_lens += first_chunk
    slots += first_chunk
    if prefix_ends is not None:
        prefix_ends += first_chunk
    if group_ends is not None:
        group_ends += first_chunk
        seq_lens = prefix_ends
    origin = tl.load(query_start_loc)
    start = tl.load(query_start_loc + chunk) - origin
    end_chunk = chunk + 1
    if group_ends is not None:
        end_chunk = tl.load(group_ends + chunk, mask=is_chunk, other=0) - first_chunk
    end = tl.load(query_start_loc + end_chunk, mask=is_chunk, other=0) - origin
    length = tl.load(seq_lens + chunk, mask=is_chunk, other=0)
    slot = tl.load(slots + chunk, mask=is_chunk, other=0).to(tl.int32)
    own_tokens = tl.where(is_chunk, end, num_tokens) - start
    if prefix_ends is not None:
        prefix_end = tl.load(prefix_ends + chunk, mask=is_chunk, other=0)
        if group_ends is not None:
            own_tokens = tl.where(is_chunk, own_tokens, 0)
        else:
            own_tokens = tl.where((prefix_end > 0) == IS_REST, own_tokens, 0)

    columns = tl.arange(0, _COLUMNS)
    tiles_before = tl.zeros([_COLUMNS], tl.int32)
    for first in range(0, num_chunks, _COLUMNS):
        others = first + columns
        is_other = others < num_chunks
        other_length = tl.load(seq_lens + others, mask=is_other, other=0)
        other_start = tl.load(query_start_loc + others, mask=is_other, other=0)
        end_chunks = others + 1
        if group_ends is not None:
            end_chunks = tl.load(group_ends + others, mask=is_other, other=0) - first_chunk
        other_end = tl.load(query_start_loc + end_chunks, mask=is_other, other=0)
        if prefix_ends is not None and group_ends is None:
            is_other &= (tl.load(prefix_ends + others, mask=is_other, other=0) > 0) == IS_REST
        is_before = is_other & ((other_length > length) | ((other_length == length) & (others < chunk)))
        tiles_before += tl.where(is_before, tl.cdiv((other_end - other_start) * GROUP, ROWS), 0)
    first_tile = tl.sum(tiles_before, 0)
    own_tiles = tl.cdiv(own_tokens * GROUP, ROWS)
    # Padding rows may have more tokens than keys: they attend to as many keys of the null block.
    num_keys = tl.where(is_chunk, tl.maximum(length, own_tokens), 0)
    if group_ends is not None:
        num_keys = length

    for first in range(0, own_tiles, _LANES):
        index = first + tl.arange(0, _LANES)
        is_mine = index < own_tiles
        tile = tiles + (first_tile + index) * ITEM_FIELDS
        store_item(tile, (slot, (own_tiles - 1 - index) * ROWS, start, own_tokens, num_keys), is_mine)
        if IS_REST:
            tl.store(tile + 5, prefix_end, mask=is_mine)
    if chunk == num_chunks:
        tl.store(num_tiles, first_tile + own_tiles)  # nothing comes behind a length of 0 and the highest number


@triton.jit
def _work(tiles, index, is_tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return how many groups of keys the last row of each tile sees; -1 where there is no tile."""
    _, first_row, _, num_tokens, num_keys = read_tile(tiles, index, is_tile)
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    num_seen = tl.maximum(num_keys - num_tokens + last_token + 1, 0)
    return tl.where(is_tile, tl.cdiv(num_seen, _SORT_KEYS), -1)


@triton.jit
def sort_tiles_kernel(
    tiles,  # [capacity, ITEM_FIELDS] int32
    num_tiles,  # [1] int32
    sorted_tiles,  # [capacity, ITEM_FIELDS] int32, written
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (_SORT_LANES tiles): each goes behind those with more work, and those before it with as much."""
    end = tl.load(num_tiles)
    first_index = tl.program_id(0) * _SORT_LANES
    if first_index >= end:
        return
    index = first_index + tl.arange(0, _SORT_LANES)
    work = _work(tiles, index, index < end, GROUP, ROWS)[:, None]
    place = tl.zeros([_SORT_LANES], tl.int32)
    for first in range(0, end, _SORT_COLUMNS):
        other = first + tl.arange(0, _SORT_COLUMNS)
        other_work = _work(tiles, other, other < end, GROUP, ROWS)[None, :]
        is_before = (other_work > work) | ((other_work == work) & (other[None, :] < index[:, None]))
        place += tl.sum(is_before.to(tl.int32), 1)
    field = tl.arange(0, ITEM_FIELDS)[None, :]
    inside = (index < end)[:, None]
    entries = tl.load(tiles + index[:, None] * ITEM_FIELDS + field, mask=inside, other=0)
    tl.store(sorted_tiles + place[:, None] * ITEM_FIELDS + field, entries, mask=inside)


class TileKey(NamedTuple):
    """The properties that tell lists of tiles apart."""

    group: int
    """Query heads for each KV head."""
    rows: int
    """Rows of a tile."""
    is_sorted: bool = False
    """Whether tiles that see more keys come first; else longer requests do."""
    scratch_units: int = 0
    """Units of the scratch that the kernel attends to (`prefill_scratch.py`); 0: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The prefill chunks of a step: the rows of a batch of R rows from `first` on."""

    query_start_loc: Tensor
    """[R + 1] int32, first token of each row of the batch."""
    seq_lens: Tensor
    """[R] int32."""
    slots: Tensor
    """[R] int64."""
    first: int
    num_tokens: int
    """Tokens of all chunks, padding included."""
    prefixes: ChunkPrefixes | None = None
    """Prefixes that the rows share, or None."""


@dataclass(slots=True)
class TileList:
    """A list of tiles in the form that kernels read."""

    items: Tensor
    """[max_tiles, ITEM_FIELDS] int32."""
    num_items: Tensor
    """[1] int32."""
    num_before: Tensor | None = None
    """[1] int32, the tiles at the head of the list that another kernel attends; None: there are none."""
    capacity: int = 0
    """The most tiles that the planned batch may have, from its shape alone."""
    part: TilePart = TilePart.WHOLE
    """The keys that the tiles attend to."""


class PrefillTiles(TileList):
    """The tiles of a step, in memory that is allocated once. Kinds of attention with the same G share one list.

    max_tokens, max_chunks: the most of a step, padding included; part: the keys that its tiles attend to.
    """

    def __init__(
        self,
        key: TileKey,
        *,
        max_tokens: int,
        max_chunks: int,
        device: torch.device,
        part: TilePart = TilePart.WHOLE,
    ) -> None:
        self._group, self._rows = key.group, key.rows
        max_tiles = self._most_tiles(max_tokens, max_chunks)
        super().__init__(
            torch.zeros(max_tiles, ITEM_FIELDS.value, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            part=part,
        )
        self._by_chunks = torch.zeros_like(self.items) if key.is_sorted else self.items

    def plan(self, chunks: Chunks) -> None:
        """List the tiles of a step's chunks, which share prefixes unless the list is of the whole."""
        prefixes = None if self.part is TilePart.WHOLE else chunks.prefixes
        assert prefixes is not None or self.part is TilePart.WHOLE
        num_chunks, num_tokens = len(chunks.seq_lens) - chunks.first, chunks.num_tokens
        self.capacity = self._most_tiles(num_tokens, num_chunks)
        assert self.capacity <= self.items.shape[0], f"{num_tokens} tokens in {num_chunks} chunks are too many"
        plan_prefill_kernel[(num_chunks + 1,)](
            chunks.query_start_loc,
            chunks.seq_lens,
            chunks.slots,
            self._by_chunks,
            self.num_items,
            None if prefixes is None else prefixes.ends,
            prefixes.group_ends if prefixes is not None and self.part is TilePart.PREFIX else None,
            chunks.first,
            num_chunks,
            num_tokens,
            IS_REST=self.part is TilePart.REST,
            GROUP=self._group,
            ROWS=self._rows,
        )
        if self._by_chunks is not self.items:
            self._sort(self._by_chunks, self)

    def _sort(self, unsorted: Tensor, target: TileList) -> None:
        """Sort the first `target.num_items` tiles of `unsorted` into `target`."""
        sort_tiles_kernel[(triton.cdiv(self.capacity, _SORT_LANES.value),)](
            unsorted,
            target.num_items,
            target.items,
            GROUP=self._group,
            ROWS=self._rows,
        )

    def _most_tiles(self, num_tokens: int, num_chunks: int) -> int:
        """Bound the number of tiles. Each chunk, and the padding behind them, may leave its last tile partly filled:
        less than one tile more for each chunk than if all rows lay side by side."""
        return -(-num_tokens * self._group // self._rows) + num_chunks
