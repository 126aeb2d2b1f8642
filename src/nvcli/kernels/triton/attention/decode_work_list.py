"""The work list of paged decode attention: chunks of the rows' keys, listed on the GPU once a step.

The planning kernel cuts the keys that each row sees into chunks of about equal length, so that the chunks × KV heads
come to a few programs for each multiprocessor, and lists the chunks, longest first (FlashInfer's scheduler, Ye et al.
2025, moved to the GPU). Nothing depends on host values but the number of rows: a launch captured in a CUDA graph for
some number of rows serves any lengths.

With a window only the last `window` keys of a row are listed, so that blocks behind the window are never read. A row of
several tokens, which are its last one and drafts, is cut as any other, at the keys that its last token sees; with a
window it begins where that of its first token does.

Batch-invariant attention (`invariant_attention.py`) cuts keys into splits: those from a multiple of SPLIT to the next,
counted from the request's first token, so that the split to which a key belongs depends on its position alone. A list
for it has an entry for each split of a row that has much more to read than the others, and one for any other row. How
it deals out the splits changes how fast a step is, and no bit of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS, store_item
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors

SPLIT = tl.constexpr(512)
"""Keys of a split."""
MAX_PARTIALS = tl.constexpr(2048)
"""The most splits of a step that have entries of their own: those of a million keys. If there would be more, no row is
cut, as there are then enough rows to keep the GPU busy."""
_MIN_CHUNK = tl.constexpr(128)
"""The fewest keys of a chunk of a row that is cut: shorter chunks cost more in reduction than they gain."""
FEW_ROWS = 8
"""Up to this many rows, fewer programs with deeper pipelines are faster; above, more programs (measured on an H200)."""
USUAL_PROGRAMS = 4
"""Programs to aim for on each multiprocessor (measured on an H200)."""
_SHORT_ROW = tl.constexpr(2048)
"""Rows of up to this many keys, on average, are short to a list that has one program on each multiprocessor for
them."""
_LONE_WARPS = 8
"""Programs of one warp to aim for on each multiprocessor, which has room for 12 with heads of 128. Rows are cut into
whole chunks, so there are more programs than that, and a few too many wait for a second round: an H200 takes 89 µs for
40 rows of 4,096 keys with 8, 114 with 12 and 103 with 16; 38, 39 and 45 for 64 rows of 100 to 1,620 keys; and 126 for
256 such rows with any of them."""
_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(256)
"""The rows of a planning program, and the rows with which it compares them at a time."""


class RowTokens(NamedTuple):
    """The tokens of B decode rows that may have several each."""

    starts: Tensor
    """[B + 1] int32, the first token of each row; the last entry is where the last row ends."""
    width: int
    """The most tokens of a row."""


@triton.jit
def _own_keys(seq_lens, starts, rows, num_rows, own_begins, window, HAS_WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Find the first key that each row attends to on its own, rounded down to a multiple of ALIGN, and the end of its
    keys: rows [R] → [R] int32 each."""
    is_row = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=is_row, other=0)
    first_keys = tl.zeros_like(lens)
    if HAS_WINDOW:
        first_seen = lens - window
        if starts is not None:
            num_tokens = tl.load(starts + rows + 1, mask=is_row, other=1) - tl.load(starts + rows, mask=is_row, other=0)
            first_seen -= tl.maximum(num_tokens, 1) - 1
        first_keys = tl.maximum(first_seen, 0) // ALIGN * ALIGN
    if own_begins is not None:
        first_token = rows
        if starts is not None:
            first_token = tl.load(starts + rows, mask=is_row, other=0)
        first_keys = tl.maximum(first_keys, tl.load(own_begins + first_token, mask=is_row, other=0))
    return first_keys, lens


@triton.jit
def cut(spans, chunk, TILE: tl.constexpr, HAS_SPLITS: tl.constexpr = False):
    """Cut spans of keys [R] int32 into chunks of about `chunk` keys: → keys in a chunk [R] and number of chunks [R]. An
    empty span (padding) makes one empty chunk. With HAS_SPLITS longer spans are cut into their splits instead."""
    if HAS_SPLITS:
        size = tl.where(spans > chunk, SPLIT, tl.maximum(spans, 1))
    else:
        num_chunks = tl.maximum(tl.cdiv(spans, chunk), 1)
        size = tl.maximum(tl.cdiv(tl.cdiv(spans, num_chunks), TILE) * TILE, TILE)
    return size, tl.maximum(tl.cdiv(spans, size), 1)


@triton.jit(
    do_not_specialize=["num_rows", "target_programs", "window", "max_partials"],
    do_not_specialize_on_alignment=["seq_lens", "starts", "slots", "own_begins"],
)
def plan_decode_kernel(
    seq_lens,  # [num_rows] int32, keys of each row
    starts,  # [num_rows + 1] int32, the first token of each row; None: they have one each
    slots,  # [num_rows] int64
    # [capacity, ITEM_FIELDS] int32, written: row, first key, end of the keys, number of the row's chunks, the row's
    # first partial result, number of this chunk, the row's slot, and the first key that the row sees (the first chunk
    # may begin before it, at the beginning of a tile of keys or of a split), or with `starts` the end of the row's keys
    items,
    num_items,  # [1] int32, written
    own_begins,  # [tokens] int32, the first key behind each token's shared segments; None: there are none
    num_rows,
    target_programs,
    window,  # keys that a token sees at most, where HAS_WINDOW
    max_partials,  # of rows that are cut into splits
    NUM_KV_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    SHORT_DIVISOR: tl.constexpr,  # target_programs is divided by it where rows are short
):
    """Program i lists the chunks of _ROWS rows, behind those of all rows with longer chunks, and of earlier rows with
    chunks of equal length."""
    columns = tl.arange(0, _COLUMNS)
    tokens = tl.zeros([_COLUMNS], tl.int64)
    for start in range(0, num_rows, _COLUMNS):
        begins, ends = _own_keys(seq_lens, starts, start + columns, num_rows, own_begins, window, HAS_WINDOW, ALIGN)
        tokens += ends - begins
    all_tokens = tl.sum(tokens, 0)
    if SHORT_DIVISOR > 1:
        is_short = all_tokens <= num_rows * _SHORT_ROW
        target_programs = tl.where(is_short, target_programs // SHORT_DIVISOR, target_programs)
    per_program = tl.cdiv(all_tokens * NUM_KV_HEADS, target_programs).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(per_program, TILE) * TILE, SPLIT if HAS_SPLITS else _MIN_CHUNK)
    if HAS_SPLITS:
        partials = tl.zeros([_COLUMNS], tl.int64)
        for start in range(0, num_rows, _COLUMNS):
            begins, ends = _own_keys(seq_lens, starts, start + columns, num_rows, own_begins, window, HAS_WINDOW, ALIGN)
            partials += tl.where(ends - begins > chunk, tl.cdiv(ends - begins, SPLIT), 0)
        if tl.sum(partials, 0) > max_partials:
            chunk = 2147483647

    rows = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    row_slots = tl.load(slots + rows, mask=rows < num_rows, other=0).to(tl.int32)
    first_keys, lens = _own_keys(seq_lens, starts, rows, num_rows, own_begins, window, HAS_WINDOW, ALIGN)
    size, num_chunks = cut(lens - first_keys, chunk, TILE, HAS_SPLITS)
    first_item = tl.zeros([_ROWS], tl.int32)
    first_partial = tl.zeros([_ROWS], tl.int32)
    total = tl.zeros([_COLUMNS], tl.int32)
    for start in range(0, num_rows, _COLUMNS):
        others = start + columns
        begins, ends = _own_keys(seq_lens, starts, others, num_rows, own_begins, window, HAS_WINDOW, ALIGN)
        other_size, other_chunks = cut(ends - begins, chunk, TILE, HAS_SPLITS)
        other_chunks = tl.where(others < num_rows, other_chunks, 0)
        total += other_chunks
        is_before = (other_size[None, :] > size[:, None]) | (
            (other_size[None, :] == size[:, None]) & (others[None, :] < rows[:, None])
        )
        first_item += tl.sum(tl.where(is_before, other_chunks[None, :], 0), 1)
        # Only rows of more than one chunk leave partial results.
        first_partial += tl.sum(tl.where(is_before & (other_chunks[None, :] > 1), other_chunks[None, :], 0), 1)

    for index in range(tl.max(num_chunks, 0)):
        item = items + (first_item + index) * ITEM_FIELDS
        is_mine = (index < num_chunks) & (rows < num_rows)
        begin, end = first_keys + index * size, tl.minimum(first_keys + (index + 1) * size, lens)
        store_item(item, (rows, begin, end, num_chunks, first_partial, index, row_slots), is_mine)
        if starts is not None:
            tl.store(item + 7, lens, mask=is_mine)
        elif HAS_WINDOW:
            tl.store(item + 7, tl.maximum(lens - window, 0), mask=is_mine)
    if tl.program_id(0) == 0:
        tl.store(num_items, tl.sum(total, 0))


class DecodeWorkList:
    """The chunks of a step for one window (None: full attention), in memory that is allocated once.

    align: the first key of a row is rounded down to a multiple of it, so that a tile of keys lies in one block.
    tile: the number of keys that the attention kernel takes at a time.
    lone_warps: when programs of the attention kernel are single warps, of which more fit on a multiprocessor, as (most
    tokens of a row, from this many rows on).
    programs: how many programs are aimed for on each multiprocessor.
    has_one_for_short: one is aimed for where rows are short.
    has_splits: rows are cut into splits; `align` is SPLIT then.
    """

    def __init__(
        self,
        *,
        window: int | None,
        num_kv_heads: int,
        tile: int,
        align: int,
        max_rows: int,
        device: torch.device,
        lone_warps: Sequence[tuple[int, int]] = (),
        programs: int = USUAL_PROGRAMS,
        has_one_for_short: bool = False,
        has_splits: bool = False,
    ) -> None:
        self._window, self._num_kv_heads = window, num_kv_heads
        self._tile, self._align = tile, align
        self._max_rows, self._has_splits = max_rows, has_splits
        self._lone_warps = lone_warps
        self._programs, self._short_divisor = programs, programs if has_one_for_short else 1
        self._num_processors = num_multiprocessors(device)
        most_chunks = self._most_programs // num_kv_heads + max_rows
        size = max_rows + MAX_PARTIALS.value if has_splits else most_chunks + 1
        self.items = torch.zeros(size, ITEM_FIELDS.value, dtype=torch.int32, device=device)
        """[capacity, ITEM_FIELDS] int32, the chunks, longest first."""
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32, the number of chunks."""

    def capacity(self, num_rows: int, tokens: RowTokens | None = None) -> int:
        """The most chunks into which `num_rows` rows are cut: target / KV heads + rows. There may be more splits, which
        this many programs for each KV head take in turn, in most steps one each."""
        return self._target(num_rows, tokens) // self._num_kv_heads + num_rows

    @property
    def max_partials(self) -> int:
        """The most chunks of rows that are cut, at most 2 × target / KV heads: a row of more than one chunk is longer
        than the chunk size, which is at least all keys × KV heads / target. Any other row of a list with splits has a
        place there as well, behind those of splits."""
        if self._has_splits:
            return int(MAX_PARTIALS.value) + self._max_rows
        return 2 * (self._most_programs // self._num_kv_heads + 1)

    def plan(
        self,
        seq_lens: Tensor,
        slots: Tensor,
        own_begins: Tensor | None = None,
        tokens: RowTokens | None = None,
        max_partials: int = MAX_PARTIALS.value,
    ) -> None:
        """List the step's chunks. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64; own_begins:
        [T] int32, the first key of each token that is not read with other rows' (None: the first one); tokens: those of
        rows that may have several (None: one each); max_partials: the most splits of rows that are cut into them."""
        num_rows = seq_lens.shape[0]
        assert num_rows <= self._max_rows, f"{num_rows} decode rows, and the backend was made for {self._max_rows}"
        plan_decode_kernel[(triton.cdiv(num_rows, _ROWS.value),)](
            seq_lens,
            None if tokens is None else tokens.starts,
            slots,
            self.items,
            self.num_items,
            own_begins,
            num_rows,
            self._target(num_rows, tokens),
            self._window or 0,
            max_partials,
            NUM_KV_HEADS=self._num_kv_heads,
            HAS_WINDOW=self._window is not None,
            ALIGN=self._align,
            TILE=self._tile,
            HAS_SPLITS=self._has_splits,
            SHORT_DIVISOR=self._short_divisor,
        )

    @property
    def _most_programs(self) -> int:
        """The most programs that are aimed for."""
        return self._num_processors * (_LONE_WARPS if self._lone_warps else self._programs)

    def has_lone_warps(self, num_rows: int, tokens: RowTokens | None = None) -> bool:
        """Whether programs of the attention kernel are single warps."""
        width = 1 if tokens is None else tokens.width
        return any(width <= most and num_rows >= rows for most, rows in self._lone_warps)

    def _target(self, num_rows: int, tokens: RowTokens | None = None) -> int:
        """The number of programs to aim for."""
        if self.has_lone_warps(num_rows, tokens):
            return self._num_processors * _LONE_WARPS
        if num_rows <= FEW_ROWS and not self._has_splits:
            return self._num_processors * (4 if self._short_divisor > 1 else 5) // 2  # whole rounds
        return self._num_processors * self._programs
