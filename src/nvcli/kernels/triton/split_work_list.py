"""The work list of batch-invariant decode attention: the splits of the rows' keys, listed on the GPU once a step.

A split is the keys from a multiple of SPLIT to the next, counted from the request's first token. So which split a key
belongs to depends on its position alone, and the results of a row's splits are put together in their order: how the
list deals out the splits changes how fast a step is, and no bit of a result. A row that has much more to read than the
others gets an entry for each of its splits, any other row one entry for all of them.

Nothing depends on host values but the number of rows: a launch captured in a CUDA graph for some number of rows serves
any lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Keys of a split."""
ITEM_FIELDS = 8
"""The int32 words of an entry: row, the row's slot, keys of the row, first split, end of the splits, the row's first
partial result, number of the row's entries, number of this entry."""
MAX_PARTIALS = 2048
"""The most splits of a step that have entries of their own: those of a million keys. Where there would be more, no row
is cut, as there are enough rows then to keep the GPU busy."""
_ROWS, _COLUMNS = 16, 256
"""A program of the planning kernel places _ROWS rows, and compares them with _COLUMNS others at a time."""
_PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def _first_keys(lens, window, HAS_WINDOW: tl.constexpr):
    """Find the first key that each row sees: [R] int32 → [R] int32."""
    first_keys = tl.zeros_like(lens)
    if HAS_WINDOW:
        first_keys = tl.maximum(lens - window, 0)
    return first_keys


@triton.jit
def _num_splits(lens, first_keys, SPLIT: tl.constexpr):
    """Count the splits that each row sees keys of, at least 1."""
    return tl.maximum(tl.cdiv(lens, SPLIT) - first_keys // SPLIT, 1)


@triton.jit(
    do_not_specialize=["num_rows", "target_programs", "window"],
    do_not_specialize_on_alignment=["seq_lens", "slots"],
)
def plan_splits_kernel(
    seq_lens,  # [num_rows] int32, keys of each row
    slots,  # [num_rows] int64
    items,  # [num_rows + MAX_PARTIALS, ITEM_FIELDS] int32, written
    num_items,  # [1] int32, written
    num_rows,
    target_programs,
    window,  # keys that a row sees at most, where HAS_WINDOW
    NUM_KV_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
):
    """Program i lists ROWS rows: behind all rows with more keys in an entry, and of those with as many behind the rows
    before them."""
    columns = tl.arange(0, COLUMNS)
    tokens = tl.zeros([COLUMNS], tl.int64)
    for start in range(0, num_rows, COLUMNS):
        lens = tl.load(seq_lens + start + columns, mask=start + columns < num_rows, other=0)
        tokens += lens - _first_keys(lens, window, HAS_WINDOW)
    # The most keys that a row may have without being cut.
    uncut = tl.maximum(tl.cdiv(tl.sum(tokens, 0) * NUM_KV_HEADS, target_programs).to(tl.int32), SPLIT)
    partials = tl.zeros([COLUMNS], tl.int64)
    for start in range(0, num_rows, COLUMNS):
        lens = tl.load(seq_lens + start + columns, mask=start + columns < num_rows, other=0)
        first_keys = _first_keys(lens, window, HAS_WINDOW)
        partials += tl.where(lens - first_keys > uncut, _num_splits(lens, first_keys, SPLIT), 0)
    if tl.sum(partials, 0) > MAX_PARTIALS:
        uncut = 2147483647

    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    row_slots = tl.load(slots + rows, mask=rows < num_rows, other=0).to(tl.int32)
    first_keys = _first_keys(lens, window, HAS_WINDOW)
    num_splits = _num_splits(lens, first_keys, SPLIT)
    is_cut = lens - first_keys > uncut
    size = tl.where(is_cut, SPLIT, lens - first_keys)
    num_entries = tl.where(is_cut, num_splits, 1)
    first_item = tl.zeros([ROWS], tl.int32)
    first_partial = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, num_rows, COLUMNS):
        others = start + columns
        other_lens = tl.load(seq_lens + others, mask=others < num_rows, other=0)
        other_first_keys = _first_keys(other_lens, window, HAS_WINDOW)
        other_is_cut = other_lens - other_first_keys > uncut
        other_size = tl.where(other_is_cut, SPLIT, other_lens - other_first_keys)
        other_entries = tl.where(other_is_cut, _num_splits(other_lens, other_first_keys, SPLIT), 1)
        other_entries = tl.where(others < num_rows, other_entries, 0)
        total += other_entries
        is_before = (other_size[None, :] > size[:, None]) | (
            (other_size[None, :] == size[:, None]) & (others[None, :] < rows[:, None])
        )
        first_item += tl.sum(tl.where(is_before, other_entries[None, :], 0), 1)
        # Only rows of more than one entry leave partial results.
        first_partial += tl.sum(tl.where(is_before & other_is_cut[None, :], other_entries[None, :], 0), 1)

    first_split = first_keys // SPLIT
    for index in range(tl.max(num_entries, 0)):
        item = items + (first_item + index) * ITEM_FIELDS
        is_mine = (index < num_entries) & (rows < num_rows)
        begin = first_split + index
        tl.store(item, rows, mask=is_mine)
        tl.store(item + 1, row_slots, mask=is_mine)
        tl.store(item + 2, lens, mask=is_mine)
        tl.store(item + 3, begin, mask=is_mine)
        tl.store(item + 4, tl.where(is_cut, begin + 1, first_split + num_splits), mask=is_mine)
        tl.store(item + 5, first_partial, mask=is_mine)
        tl.store(item + 6, num_entries, mask=is_mine)
        tl.store(item + 7, tl.zeros([ROWS], tl.int32) + index, mask=is_mine)
    if tl.program_id(0) == 0:
        tl.store(num_items, tl.sum(total, 0))


class SplitWorkList:
    """The splits of a step for one window (None: full attention), in memory that is allocated once."""

    def __init__(self, *, window: int | None, num_kv_heads: int, max_rows: int, device: torch.device) -> None:
        self._window, self._num_kv_heads = window, num_kv_heads
        self._max_rows = max_rows
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        self._target = _PROGRAMS_PER_MULTIPROCESSOR * num_processors
        self.items = torch.zeros(max_rows + MAX_PARTIALS, ITEM_FIELDS, dtype=torch.int32, device=device)
        """[max_rows + MAX_PARTIALS, ITEM_FIELDS] int32, those with the most keys first."""
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32, the number of entries."""

    def num_programs(self, num_rows: int) -> int:
        """The programs for each KV head that take the entries of `num_rows` rows in turn: most often one for each."""
        return self._target // self._num_kv_heads + num_rows

    def plan(self, seq_lens: Tensor, slots: Tensor) -> None:
        """List the step's splits. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64."""
        num_rows = seq_lens.shape[0]
        assert num_rows <= self._max_rows, f"{num_rows} decode rows, and the backend was made for {self._max_rows}"
        plan_splits_kernel[(triton.cdiv(num_rows, _ROWS),)](
            seq_lens,
            slots,
            self.items,
            self.num_items,
            num_rows,
            self._target,
            self._window or 0,
            NUM_KV_HEADS=self._num_kv_heads,
            HAS_WINDOW=self._window is not None,
            SPLIT=SPLIT,
            MAX_PARTIALS=MAX_PARTIALS,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            ITEM_FIELDS=ITEM_FIELDS,
            num_warps=4,
        )
