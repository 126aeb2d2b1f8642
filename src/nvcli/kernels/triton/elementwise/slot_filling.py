"""Filling the tables of slots when requests enter, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nvcli.kernels.step_tensors import SlotState

_COLUMNS = tl.constexpr(1024)
"""Blocks or entries that a program writes at once."""


@triton.jit(do_not_specialize=["block_table_stride", "group_stride", "num_columns"])
def _begin_slots_kernel(
    lengths_ptr,  # [S] int32, written
    block_tables_ptr,  # [G, S, ...] int32, rows block_table_stride apart, groups group_stride; written
    slots_ptr,  # [n] int32
    new_lengths_ptr,  # [n] int32
    block_table_stride,
    group_stride,
    num_columns,
    NUM_GROUPS: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
):
    """Program (slot)."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    tl.store(lengths_ptr + slot, tl.load(new_lengths_ptr + row))
    for start in range(0, num_columns, _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        for group in tl.static_range(NUM_GROUPS):
            place = block_tables_ptr + group * group_stride + slot * block_table_stride + column
            tl.store(place, NULL_BLOCK, mask=column < num_columns)


def begin_slots(state: SlotState, slots: Tensor, lengths: Tensor, *, null_block: int) -> None:
    """See `nvcli.kernels.slot_filling.begin_slots`."""
    tables = state.block_tables
    assert tables.stride(2) == 1
    _begin_slots_kernel[(len(slots),)](
        state.lengths,
        tables,
        slots,
        lengths,
        tables.stride(1),
        tables.stride(0),
        tables.shape[2],
        NUM_GROUPS=tables.shape[0],
        NULL_BLOCK=null_block,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _fill_columns_kernel(
    words_ptr,  # [NUM_WORDS, S] int32, written
    longs_ptr,  # [NUM_LONGS, S, 2] int32, the halves of int64; written
    slots_ptr,  # [n] int32
    values_ptr,  # [n, NUM_WORDS + 2 * NUM_LONGS] int32
    num_slots,
    NUM_WORDS: tl.constexpr,
    NUM_LONGS: tl.constexpr,
):
    """Program (slot)."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    field = tl.arange(0, triton.next_power_of_2(NUM_WORDS + 2 * NUM_LONGS))
    half = field - NUM_WORDS
    is_half = (half >= 0) & (half < 2 * NUM_LONGS)
    value = tl.load(values_ptr + row * (NUM_WORDS + 2 * NUM_LONGS) + field, mask=(half < 0) | is_half, other=0)
    tl.store(words_ptr + field * num_slots + slot, value, mask=half < 0)
    tl.store(longs_ptr + 2 * ((half >> 1) * num_slots + slot) + (half & 1), value, mask=is_half)


def fill_columns(words: Tensor, longs: Tensor, slots: Tensor, values: Tensor) -> None:
    """See `nvcli.kernels.slot_filling.fill_columns`."""
    assert words.is_contiguous()
    assert longs.is_contiguous()
    assert values.is_contiguous()
    _fill_columns_kernel[(len(slots),)](
        words,
        longs.view(torch.int32),
        slots,
        values,
        words.shape[1],
        NUM_WORDS=len(words),
        NUM_LONGS=len(longs),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_entries"])
def _fill_entries_kernel(
    ids_ptr,  # [S, E] int32, written
    values_ptr,  # [S, E] int32, the bits of float32; written
    slots_ptr,  # [n] int32
    entries_ptr,  # [n, 2, num_entries] int32
    num_entries,
    ENTRIES: tl.constexpr,
):
    """Program (slot)."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    for start in range(0, ENTRIES, _COLUMNS):
        entry = start + tl.arange(0, _COLUMNS)
        inside = entry < num_entries
        place = entries_ptr + row.to(tl.int64) * 2 * num_entries + entry
        tl.store(ids_ptr + slot * ENTRIES + entry, tl.load(place, mask=inside, other=0), mask=inside)
        value = tl.load(place + num_entries, mask=inside, other=0)
        tl.store(values_ptr + slot * ENTRIES + entry, value, mask=entry < ENTRIES)


def fill_entries(ids: Tensor, values: Tensor, slots: Tensor, entries: Tensor) -> None:
    """See `nvcli.kernels.slot_filling.fill_entries`."""
    assert ids.is_contiguous()
    assert values.is_contiguous()
    assert entries.is_contiguous()
    _fill_entries_kernel[(len(slots),)](
        ids, values.view(torch.int32), slots, entries, entries.shape[2], ENTRIES=ids.shape[1]
    )
