"""AnswerTable: the tokens that followed each run of tokens in other answers, to draft from.

For each run of `RUN` tokens the table holds one token: the one that followed it most recently, in any answer. Every
step with drafts enters the tokens of its answers, and so does refilling a slot. Runs that hash to the same place share
it, and the later one replaces the earlier; part of the hash is kept in the entry and tells most of them apart. A wrong
entry makes a wrong draft and does no other harm.

An entry holds, from its highest bits: the time it was made, `CHECK_BITS` of the hash, and the token. Among entries made
at the same time the largest stays, so that all ranks have the same table, in whatever order their programs run.

Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.step_tensors import RUN, TOKEN_BITS, AnswerTable, SlotState

_32_BITS = (1 << 32) - 1
_Word = TypeVar("_Word", int, Tensor)


def empty_answer_table(num_bytes: int, num_slots: int, device: torch.device) -> AnswerTable:
    """Make a table of `num_bytes`, a power of two, for `num_slots` slots, the padding slot included."""
    return AnswerTable(
        entries=torch.zeros(num_bytes // 8, dtype=torch.int64, device=device),
        ends=torch.full((num_slots,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device),
        time=torch.ones(1, dtype=torch.int64, device=device),
    )


def forget_answers(answers: AnswerTable) -> None:
    """Empty the table. A slot's tokens are not entered again until the slot is refilled."""
    answers.entries.zero_()
    answers.ends.fill_(torch.iinfo(torch.int32).max)


@with_kernel("elementwise.answer_table")
def refill_answers(answers: AnswerTable, state: SlotState, slots: Tensor, prompt_lens: Tensor) -> None:
    """Enter the remaining tokens of the answers in `slots`, before the slots are refilled with requests whose prompts
    have `prompt_lens` tokens. Both [n] int32."""
    for slot in slots.tolist():
        enter_answer(answers, state, slot, int(answers.ends[slot]))
    answers.ends[slots.long()] = prompt_lens
    answers.time.add_(1)


def enter_answer(answers: AnswerTable, state: SlotState, slot: int, first: int) -> None:
    """Enter a slot's tokens from position `first` to its last token."""
    last = int(state.lengths[slot])
    first = max(first, RUN)
    if first > last:
        return
    tokens = state.token_ids[slot, first - RUN : last + 1].long()
    words = _hash(*(tokens[back : len(tokens) - RUN + back] for back in range(RUN)))
    entries = (answers.time << 32) | (words >> TOKEN_BITS << TOKEN_BITS) | (tokens[RUN:] & ((1 << TOKEN_BITS) - 1))
    answers.entries.scatter_reduce_(0, words % len(answers.entries), entries, "amax")
    answers.ends[slot] = last + 1


def follow_answers(answers: AnswerTable, tokens: Tensor, most: int) -> list[int]:
    """Return up to `most` tokens, each of which followed those before it in some answer. tokens: [n], the row's."""
    run = [int(token) for token in tokens[-RUN:]]
    found: list[int] = []
    while len(run) == RUN and len(found) < most:
        word = _hash(*run)
        entry = int(answers.entries[word % len(answers.entries)])
        if entry == 0 or (entry & _32_BITS) >> TOKEN_BITS != word >> TOKEN_BITS:
            break
        found.append(entry & ((1 << TOKEN_BITS) - 1))
        run = [*run[1:], found[-1]]
    return found


def _hash(first: _Word, second: _Word, third: _Word) -> _Word:
    """Return a hash of 32 bits of three tokens, int64 (multipliers of xxHash, finalizer of MurmurHash3)."""
    word = first * 0x9E3779B1 + second * 0x85EBCA77 + third * 0xC2B2AE3D & _32_BITS
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _32_BITS
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _32_BITS
    return word ^ (word >> 16)
