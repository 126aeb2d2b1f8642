"""The preparation of a step's inputs in one launch, and the writing of tokens into the slot table, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from nvcli.kernels.step_tensors import SlotState, StepInputs, StepRows

_TOKENS = tl.constexpr(512)
"""Tokens that a program takes at once. Few rows have more than one."""
_LOGITS = tl.constexpr(16)
"""Logits rows that a program takes at once."""
_KEPT = tl.constexpr(128)
"""Sampled ids that a program takes."""
_WRITTEN = tl.constexpr(1024)
"""Tokens of a span that a program writes at once."""


@triton.jit(
    do_not_specialize=[
        "token_ids_stride", "block_table_stride", "group_stride", "slot_mapping_stride", "padding_slot",
    ]
)  # fmt: skip
def _prepare_inputs_kernel(
    rows,  # `StepRows`
    lengths_ptr,  # [S] int32, advanced
    token_ids_ptr,  # [S, ...] int32, rows token_ids_stride apart
    block_tables_ptr,  # [G, S, ...] int32, rows block_table_stride apart, groups group_stride
    out,  # `StepInputs`, written; groups of slot_mapping are slot_mapping_stride apart
    token_ids_stride,
    block_table_stride,
    group_stride,
    slot_mapping_stride,
    padding_slot,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row).to(tl.int64)
    num_tokens = tl.load(rows.num_tokens + row)
    num_logits = tl.load(rows.num_logits + row)
    first_token = tl.load(rows.query_start_loc + row)
    first_logits = tl.load(rows.logits_start_loc + row)
    end_logits = tl.load(rows.logits_start_loc + row + 1)
    is_real = slot != padding_slot
    length = tl.where(is_real, tl.load(lengths_ptr + slot), 0)

    for start in range(0, num_tokens, _TOKENS):
        index = start + tl.arange(0, _TOKENS)
        inside = index < num_tokens
        position = tl.where(is_real, length + index, 0)
        token_id = tl.load(token_ids_ptr + slot * token_ids_stride + position, mask=inside, other=0)
        token = first_token + index
        tl.store(out.input_ids + token, token_id, mask=inside)
        tl.store(out.positions + token, position, mask=inside)
        column = block_tables_ptr + slot * block_table_stride + position // BLOCK_SIZE
        for group in tl.static_range(NUM_GROUPS):
            block = tl.load(column + group * group_stride, mask=inside, other=0).to(tl.int64)
            place = out.slot_mapping + group * slot_mapping_stride + token
            tl.store(place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)

    for start in range(0, end_logits - first_logits, _LOGITS):
        index = start + tl.arange(0, _LOGITS)
        inside = index < end_logits - first_logits
        is_used = index < num_logits
        behind = num_tokens - num_logits + index
        place = first_logits + index
        tl.store(out.logits_rows + place, tl.where(is_used, first_token + behind, 0).to(tl.int64), mask=inside)
        tl.store(out.sample_slots + place, tl.where(is_used, slot, padding_slot), mask=inside)
        tl.store(out.sample_positions + place, tl.where(is_used, length + behind + 1, 0), mask=inside)

    tl.store(out.slots + row, slot)
    tl.store(out.seq_lens + row, length + num_tokens)
    # No other row has this slot; the padding slot, which several rows may have, keeps its length. All warps have read
    # the length before one of them writes it.
    tl.debug_barrier()
    tl.store(lengths_ptr + slot, length + num_tokens, mask=is_real)


def prepare_inputs(rows: StepRows, state: SlotState, out: StepInputs) -> None:
    """See `nvcli.kernels.prepare_inputs.prepare_inputs`."""
    _prepare_inputs_kernel[(len(rows.slots),)](
        rows,
        state.lengths,
        state.token_ids,
        state.block_tables,
        out,
        state.token_ids.stride(0),
        state.block_tables.stride(1),
        state.block_tables.stride(0),
        out.slot_mapping.stride(0),
        state.padding_slot,
        NUM_GROUPS=len(state.block_tables),
        BLOCK_SIZE=state.block_size,
    )


@triton.jit(do_not_specialize=["stride", "num_rows", "padding_slot"])
def _keep_tokens_kernel(
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart, written
    slots_ptr,  # [N] int64
    positions_ptr,  # [N] int32
    ids_ptr,  # [N] int32
    stride,
    num_rows,
    padding_slot,
):
    """Program (_KEPT rows)."""
    rows = tl.program_id(0) * _KEPT + tl.arange(0, _KEPT)
    inside = rows < num_rows
    slot = tl.load(slots_ptr + rows, mask=inside, other=0)
    position = tl.load(positions_ptr + rows, mask=inside, other=0)
    token_id = tl.maximum(tl.load(ids_ptr + rows, mask=inside, other=0), 0)
    token_id = tl.where(slot == padding_slot, 0, token_id)
    tl.store(token_ids_ptr + slot * stride + position, token_id, mask=inside)


def keep_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
    """See `nvcli.kernels.prepare_inputs.keep_tokens`."""
    _keep_tokens_kernel[(triton.cdiv(len(ids), _KEPT.value),)](
        token_ids, slots, positions, ids, token_ids.stride(0), len(ids), len(token_ids) - 1, num_warps=4
    )


@triton.jit(do_not_specialize=["stride"])
def _write_tokens_kernel(
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart, written
    slots_ptr,  # [n] int32
    starts_ptr,  # [n] int32
    offsets_ptr,  # [n + 1] int32
    ids_ptr,  # [offsets[n]] int32
    stride,
):
    """Program (span)."""
    span = tl.program_id(0)
    first, end = tl.load(offsets_ptr + span), tl.load(offsets_ptr + span + 1)
    target = token_ids_ptr + tl.load(slots_ptr + span).to(tl.int64) * stride + tl.load(starts_ptr + span) - first
    for start in range(first, end, _WRITTEN):
        index = start + tl.arange(0, _WRITTEN)
        tl.store(target + index, tl.load(ids_ptr + index, mask=index < end), mask=index < end)


def write_tokens(token_ids: Tensor, slots: Tensor, starts: Tensor, offsets: Tensor, ids: Tensor) -> None:
    """See `nvcli.kernels.prepare_inputs.write_tokens`."""
    _write_tokens_kernel[(len(slots),)](token_ids, slots, starts, offsets, ids, token_ids.stride(0), num_warps=4)
