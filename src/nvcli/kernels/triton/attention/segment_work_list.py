"""The work list of attention over shared segments: tiles of rows against chunks of the keys that they share.

Four kernels plan it on the GPU once a step. The first finds the segments of each row, by level: a request's first
segment is at level 0, the one behind it at level 1, and so on; a segment is at one level for all of its rows. The
second joins segments to those before them where that makes fewer results and no more tiles. The third cuts segments
into chunks and their rows into tiles, and gives each row places for its partial results, one for each chunk of each of
its segments. The last one is that of `decode_work_list.py`: it lists what is each row's own.
Requests may have more levels than LEVELS: what is behind them is read as their own.

Shapes: R rows, LEVELS levels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.segment_tables import SEGMENT_FIELDS
from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS, store_item
from nvcli.kernels.triton.attention.decode_work_list import cut
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors

_FIELDS = tl.constexpr(SEGMENT_FIELDS)
LEVELS = tl.constexpr(4)
"""The most segments of a request that are read once for all rows; each adds a partial result to a row."""
_MIN_CHUNK = tl.constexpr(256)
"""The fewest keys of a chunk of a segment that is cut: each further chunk adds a partial result to each row."""
_TILE_COST = tl.constexpr(256)
"""The fixed cost of a tile, its rows' partial results included, in keys: about 512 (`prefill_tiles.py`), less a
margin."""
_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(256)
"""The rows of a program, and the rows with which it compares them at a time."""


class SegmentLists(NamedTuple):
    """Tensors that the kernels write; all are int32."""

    row_segments: Tensor
    """[LEVELS, max_rows], the segment of each row at each level; 0: it has none."""
    joined_segments: Tensor
    """[LEVELS, max_rows], the same after some were joined to those behind them."""
    joined_spans: Tensor
    """[LEVELS, max_rows], keys of these segments and of those joined to them."""
    members: Tensor
    """[LEVELS, max_rows], the rows that have a segment, grouped by segment."""
    first_partials: Tensor
    """[LEVELS, max_rows], the place of each row's first partial result of its segment."""
    own_begins: Tensor
    """[max_rows], the first key of each row behind its segments."""
    num_partials: Tensor
    """[max_rows], the number of each row's partial results, which begin at its place of level 0."""
    items: Tensor
    """[capacity, ITEM_FIELDS]: where the item's level begins in the lists of rows, the first of the tile's rows among
    the members of the level, number of rows, first key of the chunk, end of its keys, number of the chunk, slot of the
    first row."""
    num_items: Tensor
    """[1], the number of items."""
    work: Tensor
    """[2], the amount of work: keys of all tiles, with the fixed cost of each tile, and keys of the rows' own."""


@triton.jit(
    do_not_specialize=["num_rows", "window"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "slot_segments", "segments"],
)
def find_segments_kernel(
    slots,  # [R] int64
    seq_lens,  # [R] int32
    slot_segments,  # [S] int32
    segments,  # [N + 1, SEGMENT_FIELDS] int32
    lists,  # `SegmentLists`, of which `row_segments` and `own_begins` are written, and the counts cleared
    max_rows,
    num_rows,
    window,  # keys that a row sees at most, where HAS_WINDOW
    HAS_WINDOW: tl.constexpr,
):
    """Program (_ROWS rows)."""
    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    is_row = rows < num_rows
    slot = tl.load(slots + rows, mask=is_row, other=0)
    last = tl.load(slot_segments + slot, mask=is_row, other=0)
    depth = tl.zeros([_ROWS], tl.int32)
    segment = last
    while tl.max(segment, 0) > 0:
        depth += (segment > 0).to(tl.int32)
        segment = tl.load(segments + segment * _FIELDS + 2)  # that of segment 0 is 0
    levels = tl.arange(0, LEVELS)
    found = tl.zeros([_ROWS, LEVELS], tl.int32)
    segment = last
    while tl.max(segment, 0) > 0:
        depth -= (segment > 0).to(tl.int32)
        found = tl.where((levels[None, :] == depth[:, None]) & (segment > 0)[:, None], segment[:, None], found)
        segment = tl.load(segments + segment * _FIELDS + 2)
    end = tl.load(segments + found * _FIELDS + 1)
    if HAS_WINDOW:
        # The window has left the segment behind; a request that never had its blocks is among these.
        lens = tl.load(seq_lens + rows, mask=is_row, other=0)
        found = tl.where(end > (lens - window)[:, None], found, 0)
    place = levels[None, :] * max_rows + rows[:, None]
    tl.store(lists.row_segments + place, found, mask=is_row[:, None])
    tl.store(lists.own_begins + rows, tl.max(tl.where(found > 0, end, 0), 1), mask=is_row)
    if tl.program_id(0) == 0:
        tl.store(lists.num_items, 0)
        tl.store(lists.work + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["segments"])
def join_levels_kernel(
    segments,  # [N + 1, SEGMENT_FIELDS] int32
    lists,  # `SegmentLists`, of which `joined_segments` and `joined_spans` are written
    max_rows,
    num_rows,
    TILE_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Program (_ROWS rows). Where the rows of a segment fill their tiles, these tiles also take the keys of the segment
    before it, which saves the rows a partial result each. Not with a window, which may have left that segment behind
    for some of the rows."""
    columns = tl.arange(0, _COLUMNS)
    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    is_row = rows < num_rows
    segment = tl.load(lists.row_segments + rows, mask=is_row, other=0)
    begin = tl.load(segments + segment * _FIELDS)
    for level in tl.static_range(LEVELS):
        span = tl.load(segments + segment * _FIELDS + 1) - begin
        place = level * max_rows + rows
        if level + 1 < LEVELS:
            child = tl.load(lists.row_segments + place + max_rows, mask=is_row, other=0)
            num_members = tl.zeros([_ROWS], tl.int32)
            for start in range(0, num_rows, _COLUMNS):
                others = start + columns
                other = tl.load(lists.row_segments + (level + 1) * max_rows + others, mask=others < num_rows, other=0)
                num_members += tl.sum((other[None, :] == child[:, None]).to(tl.int32), 1)
            padding = tl.cdiv(num_members, TILE_ROWS) * TILE_ROWS - num_members
            pays = padding.to(tl.int64) * span <= num_members.to(tl.int64) * _TILE_COST
            is_joined = (segment > 0) & (child > 0) & pays & (not HAS_WINDOW)
            tl.store(lists.joined_segments + place, tl.where(is_joined, 0, segment), mask=is_row)
            tl.store(lists.joined_spans + place, tl.where(is_joined, 0, span), mask=is_row)
            begin = tl.where(is_joined, begin, tl.load(segments + child * _FIELDS))
            segment = child
        else:
            tl.store(lists.joined_segments + place, segment, mask=is_row)
            tl.store(lists.joined_spans + place, span, mask=is_row)


@triton.jit(
    do_not_specialize=["num_rows", "target_programs", "width"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "segments"],
)
def plan_segments_kernel(
    slots,  # [R] int64
    seq_lens,  # [R] int32
    segments,  # [N + 1, SEGMENT_FIELDS] int32
    lists,  # `SegmentLists`, of which the rest is written
    max_rows,
    num_rows,
    target_programs,
    width,  # so many rows stand for the tokens of one, which read their own keys together
    NUM_KV_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (_ROWS rows). The list is in the order in which programs reach it, on which nothing else depends."""
    columns = tl.arange(0, _COLUMNS)
    tokens = tl.zeros([_COLUMNS], tl.int64)
    for level in tl.static_range(LEVELS):
        for start in range(0, num_rows, _COLUMNS):
            others = start + columns
            tokens += tl.load(lists.joined_spans + level * max_rows + others, mask=others < num_rows, other=0)
    per_program = tl.cdiv(tl.sum(tokens, 0) * NUM_KV_HEADS, target_programs * TILE_ROWS).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(per_program, KEYS) * KEYS, _MIN_CHUNK)

    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    is_row = rows < num_rows
    row_slots = tl.load(slots + rows, mask=is_row, other=0).to(tl.int32)
    own = tl.load(seq_lens + rows, mask=is_row, other=0) - tl.load(lists.own_begins + rows, mask=is_row, other=0)
    tl.atomic_add(lists.work + 1, tl.sum(tl.maximum(own, 0), 0) // width, sem="relaxed")
    tile_keys = tl.zeros([_ROWS], tl.int32)
    first_partial = tl.zeros([_ROWS], tl.int32)
    for level in tl.static_range(LEVELS):
        for start in range(0, num_rows, _COLUMNS):
            others = start + columns
            other_span = tl.load(lists.joined_spans + level * max_rows + others, mask=others < num_rows, other=0)
            _, other_chunks = cut(other_span, chunk, KEYS)
            is_before = (others[None, :] < rows[:, None]) & (other_span > 0)[None, :]
            first_partial += tl.sum(tl.where(is_before, other_chunks[None, :], 0), 1)
    count = tl.zeros([_ROWS], tl.int32)
    for level in tl.static_range(LEVELS):
        segment = tl.load(lists.joined_segments + level * max_rows + rows, mask=is_row, other=0)
        span = tl.load(lists.joined_spans + level * max_rows + rows, mask=is_row, other=0)
        size, num_chunks = cut(span, chunk, KEYS)
        num_chunks = tl.where(segment > 0, num_chunks, 0)
        tl.store(lists.first_partials + level * max_rows + rows, first_partial + count, mask=is_row)
        count += num_chunks
        rank = tl.zeros([_ROWS], tl.int32)
        num_members = tl.zeros([_ROWS], tl.int32)
        place = tl.zeros([_ROWS], tl.int32)
        for start in range(0, num_rows, _COLUMNS):
            others = start + columns
            other = tl.load(lists.joined_segments + level * max_rows + others, mask=others < num_rows, other=0)[None, :]
            is_same = (other == segment[:, None]).to(tl.int32)
            num_members += tl.sum(is_same, 1)
            rank += tl.sum(tl.where(others[None, :] < rows[:, None], is_same, 0), 1)
            place += tl.sum(((other > 0) & (other < segment[:, None])).to(tl.int32), 1)
        place += rank
        tl.store(lists.members + level * max_rows + place, rows, mask=segment > 0)
        # The first row of each tile lists its items.
        is_first = (segment > 0) & (rank % TILE_ROWS == 0)
        num_chunks = tl.where(is_first, num_chunks, 0)
        tile_keys += tl.where(is_first, span + num_chunks * _TILE_COST, 0)
        first_item = tl.atomic_add(
            lists.num_items + tl.zeros([_ROWS], tl.int32), num_chunks, mask=is_first, sem="relaxed"
        )
        end = tl.load(segments + segment * _FIELDS + 1)
        begin = end - span
        for index in range(tl.max(num_chunks, 0)):
            item = lists.items + (first_item + index) * ITEM_FIELDS
            is_mine = index < num_chunks
            num_rows_of_tile = tl.minimum(num_members - rank, TILE_ROWS)
            keys = begin + index * size
            keys_end = tl.minimum(keys + size, end)
            store_item(item, (level * max_rows, place, num_rows_of_tile, keys, keys_end, index, row_slots), is_mine)
    tl.store(lists.num_partials + rows, count, mask=is_row)
    tl.atomic_add(lists.work, tl.sum(tile_keys, 0), sem="relaxed")


class SegmentWorkList:
    """The tiles of a step for one KV group and window (None: full attention), in memory that is allocated once.

    keys: the number of keys that the attention kernel takes at a time. tile_rows: the rows of a tile.
    """

    def __init__(
        self, *, window: int | None, num_kv_heads: int, keys: int, tile_rows: int, max_rows: int, device: torch.device
    ) -> None:
        self._window, self._num_kv_heads = window, num_kv_heads
        self._keys, self._tile_rows, self.max_rows = keys, tile_rows, max_rows
        self.num_processors = num_multiprocessors(device)
        """The multiprocessors of the GPU."""
        self.num_programs = 2 * self.num_processors
        """The number of parts of about equal size into which the work is cut."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        by_level = [(LEVELS.value, max_rows)] * 5
        # A tile has a row at least, and all rows' chunks together are at most `max_partials`.
        items = self.max_partials, ITEM_FIELDS.value
        self.lists = SegmentLists._make(
            ints(*shape) for shape in (*by_level, (max_rows,), (max_rows,), items, (1,), (2,))
        )

    @property
    def max_partials(self) -> int:
        """The most partial results of all rows: one for each level, and one for each chunk size of keys, which is at
        least all rows' keys × KV heads / programs / rows of a tile."""
        return self.max_rows * int(LEVELS.value) + self._tile_rows * self.num_programs // self._num_kv_heads

    def plan(self, seq_lens: Tensor, slots: Tensor, segments: Tensor, slot_segments: Tensor, width: int = 1) -> None:
        """List the step's tiles. seq_lens: [R] int32, keys of each row; slots: [R] int64; segments and slot_segments:
        the KV group's of `SegmentTables`; width: the number of rows that stand for the tokens of one."""
        num_rows = seq_lens.shape[0]
        assert num_rows <= self.max_rows, f"{num_rows} rows, and the list was made for {self.max_rows}"
        grid = (triton.cdiv(num_rows, _ROWS.value),)
        find_segments_kernel[grid](
            slots,
            seq_lens,
            slot_segments,
            segments,
            self.lists,
            self.max_rows,
            num_rows,
            self._window or 0,
            HAS_WINDOW=self._window is not None,
            num_warps=1,
        )
        join_levels_kernel[grid](
            segments,
            self.lists,
            self.max_rows,
            num_rows,
            TILE_ROWS=self._tile_rows,
            HAS_WINDOW=self._window is not None,
        )
        plan_segments_kernel[grid](
            slots,
            seq_lens,
            segments,
            self.lists,
            self.max_rows,
            num_rows,
            self.num_programs,
            width,
            NUM_KV_HEADS=self._num_kv_heads,
            TILE_ROWS=self._tile_rows,
            KEYS=self._keys,
        )
