"""The table of what followed runs of tokens in answers, in Triton: see `nvcli.kernels.answer_table`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.step_tensors import CHECK_BITS, RUN, TOKEN_BITS

if TYPE_CHECKING:
    from nvcli.kernels.step_tensors import AnswerTable, SlotState

_TOKENS = tl.constexpr(128)
"""Tokens that a program enters at a time."""
_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_TOKEN_MASK = tl.constexpr((1 << TOKEN_BITS) - 1)
_CHECK_MASK = tl.constexpr((1 << CHECK_BITS) - 1)
_RUN = tl.constexpr(RUN)


@triton.jit
def _hash(first, second, third):
    """Return a 32-bit hash of three tokens, as `nvcli.kernels.answer_table` makes it."""
    word = first.to(tl.uint32) * 0x9E3779B1 + second.to(tl.uint32) * 0x85EBCA77 + third.to(tl.uint32) * 0xC2B2AE3D
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def enter_answer(entries_ptr, tokens_ptr, first, last, time, NUM_ENTRIES: tl.constexpr, TOKENS: tl.constexpr):
    """Enter the tokens at positions `first` to `last` of a slot whose tokens begin at `tokens_ptr`."""
    for start in range(tl.maximum(first, _RUN), last + 1, TOKENS):
        position = start + tl.arange(0, TOKENS)
        inside = position <= last
        place = tokens_ptr + position
        word = _hash(
            tl.load(place - 3, mask=inside, other=0),
            tl.load(place - 2, mask=inside, other=0),
            tl.load(place - 1, mask=inside, other=0),
        )
        token = tl.load(place, mask=inside, other=0) & _TOKEN_MASK
        check = word >> _TOKEN_BITS
        entry = (time << 32) | (check.to(tl.int64) << _TOKEN_BITS) | token.to(tl.int64)
        tl.atomic_max(entries_ptr + (word & (NUM_ENTRIES - 1)).to(tl.int64), entry, mask=inside, sem="relaxed")


@triton.jit
def follow_answers(entries_ptr, tokens_ptr, last, most, NUM_ENTRIES: tl.constexpr):
    """Write up to `most` tokens after the one at `last`, each of which followed those before it in some answer. The
    slot's tokens begin at `tokens_ptr`. Returns the number of tokens written."""
    num_found = 0
    num_wanted = tl.where(last + 1 >= _RUN, most, 0)
    place = tokens_ptr + tl.maximum(last, _RUN - 1)
    first = tl.load(place - 2)
    second = tl.load(place - 1)
    third = tl.load(place)
    while num_found < num_wanted:
        word = _hash(first, second, third)
        entry = tl.load(entries_ptr + (word & (NUM_ENTRIES - 1)).to(tl.int64))
        check = (entry >> _TOKEN_BITS) & _CHECK_MASK
        if (entry != 0) & (check == (word >> _TOKEN_BITS).to(tl.int64)):
            first = second
            second = third
            third = (entry & _TOKEN_MASK).to(tl.int32)
            num_found += 1
            tl.store(tokens_ptr + last + num_found, third)
        else:
            num_wanted = num_found
    return num_found


@triton.jit(do_not_specialize=["stride"])
def _refill_answers_kernel(
    slots_ptr,  # [n] int32
    prompt_lens_ptr,  # [n] int32
    lengths_ptr,  # [S] int32
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart
    answers,  # `AnswerTable`; its entries and ends are written
    stride,
    NUM_ENTRIES: tl.constexpr,
):
    """Program (slot)."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    first = tl.load(answers.ends + slot)
    last = tl.load(lengths_ptr + slot)
    tokens_ptr = token_ids_ptr + slot * stride
    enter_answer(answers.entries, tokens_ptr, first, last, tl.load(answers.time), NUM_ENTRIES, _TOKENS)
    tl.store(answers.ends + slot, tl.load(prompt_lens_ptr + row))


def refill_answers(answers: AnswerTable, state: SlotState, slots: Tensor, prompt_lens: Tensor) -> None:
    """See `nvcli.kernels.answer_table.refill_answers`."""
    _refill_answers_kernel[(len(slots),)](
        slots,
        prompt_lens,
        state.lengths,
        state.token_ids,
        answers,
        state.token_ids.stride(0),
        NUM_ENTRIES=len(answers.entries),
    )
    answers.time.add_(1)
