"""The inputs of a decode step in one launch: a program for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nvcli.kernels.decode_inputs import DecodeInputs


@triton.jit
def _decode_inputs_kernel(
    slots_ptr,
    num_computed_ptr,
    token_ids_ptr,
    block_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    token_ids_stride,
    block_table_stride,
    block_tables_stride,
    num_columns,
    padding_slot,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + index)
    position = tl.load(num_computed_ptr + slot)
    table = block_table_ptr + slot * block_table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    tl.store(input_ids_ptr + index, tl.load(token_ids_ptr + slot * token_ids_stride + position))
    tl.store(positions_ptr + index, position)
    tl.store(slot_mapping_ptr + index, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens_ptr + index, position + 1)
    # No other row has this slot; rows of padding, which share one, all read what nobody changes.
    tl.store(num_computed_ptr + slot, position + 1, mask=slot != padding_slot)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        ids = tl.load(table + columns, mask=inside, other=0)
        tl.store(block_tables_ptr + index * block_tables_stride + columns, ids, mask=inside)


def decode_inputs(
    slots: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    out: DecodeInputs,
    *,
    block_size: int,
    padding_slot: int,
) -> None:
    """See `nvcli.kernels.decode_inputs.decode_inputs`."""
    _decode_inputs_kernel[(len(slots),)](
        slots,
        num_computed,
        token_ids,
        block_table,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.seq_lens,
        out.block_tables,
        token_ids.stride(0),
        block_table.stride(0),
        out.block_tables.stride(0),
        out.block_tables.shape[1],
        padding_slot,
        BLOCK_SIZE=block_size,
        COLUMNS=min(triton.next_power_of_2(out.block_tables.shape[1]), 1024),
        num_warps=1,
    )
