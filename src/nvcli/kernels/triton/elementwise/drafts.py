"""Finding and checking drafts, in Triton: see `nvcli.kernels.drafts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.drafts import LEAST_MATCH, LONGEST_MATCH
from nvcli.kernels.step_tensors import RUN
from nvcli.kernels.triton.elementwise.answer_table import enter_answer, follow_answers

if TYPE_CHECKING:
    from nvcli.kernels.step_tensors import AnswerTable, DraftRows, SlotState, StepInputs, StepRows

_LONGEST, _LEAST, _RUN = tl.constexpr(LONGEST_MATCH), tl.constexpr(LEAST_MATCH), tl.constexpr(RUN)
_TOKENS = tl.constexpr(1024)
"""Tokens that a program compares at a time."""
_DRAFTS = tl.constexpr(16)
"""Upper bound on a row's drafts, and on its tokens in a step."""


@triton.jit(do_not_specialize=["stride"])
def _find_drafts_kernel(
    rows,  # `StepRows`
    drafts,  # `DraftRows`; num_drafts, sources and matches are written
    lengths_ptr,  # [S] int32
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart, written
    answers,  # `AnswerTable`, whose time is advanced; None: there is no table
    stride,
    NUM_ENTRIES: tl.constexpr,
    FOR_ALL: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    most = tl.load(drafts.most + row)
    if answers is not None:  # noqa: SIM102  # known when the kernel is compiled, unlike the row
        if row == 0:
            tl.store(answers.time, tl.load(answers.time) + 1)
    if most == 0:
        tl.store(drafts.num_drafts + row, 0)
        tl.store(drafts.sources + row, 0)
        tl.store(drafts.matches + row, 0)
    else:
        slot = tl.load(rows.slots + row).to(tl.int64)
        last = tl.load(lengths_ptr + slot)
        tokens_ptr = token_ids_ptr + slot * stride
        best = tl.full((), 0, tl.int64)
        for start in range(0, last, _TOKENS):
            end = start + tl.arange(0, _TOKENS)
            length = tl.zeros((_TOKENS,), tl.int32)
            runs_on = end < last
            for back in tl.static_range(_LONGEST):
                wanted = tl.load(tokens_ptr + tl.maximum(last - back, 0))
                there = tl.load(tokens_ptr + end - back, mask=runs_on & (end >= back), other=-1)
                runs_on = runs_on & (there == wanted)
                length += runs_on.to(tl.int32)
            # The longest match, and among equally long ones the latest.
            best = tl.maximum(best, tl.max((length.to(tl.int64) << 32) | end, axis=0))
        is_found = (best >> 32) >= _LEAST
        found = tl.where(is_found, (best & 0x7FFFFFFF).to(tl.int32), 0)
        num_others = 0
        if answers is not None:
            num_wanted = tl.where((best >> 32) < _RUN, most, 0)
            num_others = follow_answers(answers.entries, tokens_ptr, last, num_wanted, NUM_ENTRIES)
        num_drafts = most
        if not FOR_ALL:
            num_drafts = tl.where(num_others > 0, num_others, tl.where(is_found, most, 0))
        index = tl.arange(0, _DRAFTS)
        inside = (index >= num_others) & (index < num_drafts)
        draft = tl.load(tokens_ptr + found + 1 + index % tl.maximum(last - found, 1), mask=inside, other=0)
        tl.store(tokens_ptr + last + 1 + index, draft, mask=inside)
        tl.store(drafts.num_drafts + row, num_drafts)
        tl.store(drafts.sources + row, tl.where(num_others > 0, 1, 0))
        tl.store(drafts.matches + row, tl.where(is_found, (best >> 32).to(tl.int32), 0))


def find_drafts(
    rows: StepRows, state: SlotState, drafts: DraftRows, answers: AnswerTable | None, *, for_all: bool = False
) -> None:
    """See `nvcli.kernels.drafts.find_drafts`."""
    _find_drafts_kernel[(len(rows.slots),)](
        rows,
        drafts,
        state.lengths,
        state.token_ids,
        answers,
        state.token_ids.stride(0),
        NUM_ENTRIES=0 if answers is None else len(answers.entries),
        FOR_ALL=for_all,
    )


@triton.jit
def _coins(slot, positions):
    """Return [n] numbers below 65,536, as `nvcli.kernels.drafts` makes them."""
    word = positions.to(tl.uint32) * 0x9E3779B1 + slot.to(tl.uint32) * 0x85EBCA77
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return ((word ^ (word >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "padding_slot", "accepted"])
def _accept_drafts_kernel(
    rows,  # `StepRows`
    drafts,  # `DraftRows`; counts are written
    inputs,  # `StepInputs`
    ids_ptr,  # [N] int32
    held_ptr,  # None, or [N] int32
    lengths_ptr,  # [S] int32, written
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart, written
    answers,  # `AnswerTable`; its entries and ends are written. None: there is no table
    stride,
    padding_slot,
    accepted,
    NUM_ENTRIES: tl.constexpr,
    THROWS_COINS: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row).to(tl.int64)
    num_logits = tl.load(rows.num_logits + row)
    count = 0
    if (num_logits > 0) & (slot != padding_slot):
        start = tl.load(rows.logits_start_loc + row)
        first = tl.load(inputs.sample_positions + start)
        tried = tl.minimum(tl.load(drafts.num_drafts + row), num_logits - 1)
        index = tl.arange(0, _DRAFTS)
        inside = index < num_logits
        sampled = tl.load(ids_ptr + start + index, mask=inside, other=0)
        has_draft = index < tried
        if THROWS_COINS:
            is_right = _coins(slot, first + 1 + index) < accepted
        else:
            place = tl.load(inputs.logits_rows + start + 1 + index, mask=has_draft, other=0)
            is_right = sampled == tl.load(inputs.input_ids + place, mask=has_draft, other=-2)
        count = 1 + tl.min(tl.where(has_draft & is_right, _DRAFTS, index), axis=0)
        if num_logits > 1:
            count = tl.maximum(tl.minimum(count, tl.load(drafts.limits + row) - first + 1), 0)
        if held_ptr is not None:
            count = tl.where(tl.load(held_ptr + start) != 0, 0, count)
        tokens_ptr = token_ids_ptr + slot * stride
        tl.store(tokens_ptr + first + index, tl.maximum(sampled, 0), mask=index < count)
        tl.store(lengths_ptr + slot, first - 1 + count)
        if answers is not None:
            tl.debug_barrier()  # all threads see the tokens
            last = first - 1 + count
            enter_from = tl.maximum(tl.minimum(tl.load(answers.ends + slot), first), _RUN)
            if enter_from <= last:
                time = tl.load(answers.time)
                enter_answer(answers.entries, tokens_ptr, enter_from, last, time, NUM_ENTRIES, _DRAFTS)
                tl.store(answers.ends + slot, last + 1)
    tl.store(drafts.counts + row, count)


def accept_drafts(
    rows: StepRows,
    state: SlotState,
    inputs: StepInputs,
    drafts: DraftRows,
    answers: AnswerTable | None,
    ids: Tensor,
    held: Tensor | None = None,
    *,
    accepted: int = -1,
) -> None:
    """See `nvcli.kernels.drafts.accept_drafts`."""
    _accept_drafts_kernel[(len(rows.slots),)](
        rows,
        drafts,
        inputs,
        ids,
        held,
        state.lengths,
        state.token_ids,
        answers,
        state.token_ids.stride(0),
        state.padding_slot,
        accepted,
        NUM_ENTRIES=0 if answers is None else len(answers.entries),
        THROWS_COINS=accepted >= 0,
        num_warps=1,
    )
