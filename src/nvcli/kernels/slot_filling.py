"""Filling the tables of slots on the device when requests enter: each operation is one launch on a GPU.

Plain torch is the reference; CUDA tensors take the Triton kernels that are held to it.
Shapes: S slots; n of them, which requests enter, none of them twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.step_tensors import SlotState


@with_kernel("elementwise.slot_filling")
def begin_slots(state: SlotState, slots: Tensor, lengths: Tensor, *, null_block: int) -> None:
    """Let slots [n] have `lengths` [n] tokens in the cache, and `null_block` in all columns of their block
    tables. Both int32."""
    index = slots.long()
    state.lengths[index] = lengths
    state.block_tables.index_fill_(1, index, null_block)


@with_kernel("elementwise.slot_filling")
def fill_columns(words: Tensor, longs: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write the columns of slots [n] int32 in two tables: words [F, S] int32 and longs [L, S] int64. Row i of values
    [n, F + 2 L] int32 has the words of a slot, and then its longs, the low half of each first."""
    index = slots.long()
    words[:, index] = values[:, : len(words)].T
    halves = values[:, len(words) :].flatten().clone()  # where int64 may begin
    longs[:, index] = halves.view(torch.int64).view(len(slots), -1).T


@with_kernel("elementwise.slot_filling")
def fill_entries(ids: Tensor, values: Tensor, slots: Tensor, entries: Tensor) -> None:
    """Write what slots [n] int32 have in two tables, ids [S, E] int32 and values [S, E] float32. `entries` [n, 2, e]
    int32 has the ids of each slot, and then the bits of their values. Values after these become 0."""
    index, count = slots.long(), entries.shape[2]
    ids[index, :count] = entries[:, 0]
    values[index, :count] = entries[:, 1].contiguous().view(torch.float32)
    values[index, count:] = 0.0
