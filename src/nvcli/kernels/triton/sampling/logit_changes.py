"""Penalties, biases and forbidden tokens, in Triton: one program for each row, which touches no more of its logits than
the tokens that it changes.

A penalised row counts its tokens in memory of its own, an entry for each token of the vocabulary. Then it goes over its
tokens once more: the first thread to take the count of a token, and leave none, changes its logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.logit_changes import lowest_logit

if TYPE_CHECKING:
    from nvcli.kernels.sampling_columns import LogitChanges

_TOKENS, _ENTRIES = tl.constexpr(1024), tl.constexpr(256)
"""Tokens and entries that a program looks at together."""
_IN_PROMPT = tl.constexpr(1 << 30)
"""The bit of a count that is set for tokens of the prompt."""


@triton.jit(do_not_specialize=["num_penalised", "num_entries", "token_stride"])
def _change_logits_kernel(
    logits_ptr,  # [N, V] float32, rows logits_stride apart; changed
    counts_ptr,  # [num_penalised, V] int32, zeros
    at_ptr,  # [n] int32
    slots_ptr,  # [N] int64
    positions_ptr,  # [N] int32
    token_ids_ptr,  # [S, L] int32, rows token_stride apart
    changes,  # `LogitChanges`
    logits_stride,
    token_stride,
    entry_stride,
    vocab_size,
    num_penalised,
    num_entries,
):
    """Program (row with changes)."""
    number = tl.program_id(0)
    row = tl.load(at_ptr + number).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    logits_ptr += row * logits_stride
    if number < num_penalised:
        presence = tl.load(changes.presence_penalty + slot)
        frequency = tl.load(changes.frequency_penalty + slot)
        repetition = tl.load(changes.repetition_penalty + slot)
        prompt_len = tl.load(changes.prompt_len + slot)
        counts_ptr += number.to(tl.int64) * vocab_size
        token_ids_ptr += slot * token_stride
        first = 0 if repetition != 1 else prompt_len
        for start in range(first, position, _TOKENS):
            place = start + tl.arange(0, _TOKENS)
            token = tl.load(token_ids_ptr + place, mask=place < position, other=0)
            tl.atomic_or(counts_ptr + token, _IN_PROMPT, mask=place < min(prompt_len, position), sem="relaxed")
            tl.atomic_add(counts_ptr + token, 1, mask=(place >= prompt_len) & (place < position), sem="relaxed")
        tl.debug_barrier()
        for start in range(first, position, _TOKENS):
            place = start + tl.arange(0, _TOKENS)
            token = tl.load(token_ids_ptr + place, mask=place < position, other=0)
            found = tl.atomic_xchg(counts_ptr + token, 0, mask=place < position, sem="relaxed")
            is_mine = (place < position) & (found != 0)
            count = (found & (_IN_PROMPT - 1)).to(tl.float32)
            logit = tl.load(logits_ptr + token, mask=is_mine, other=0.0)
            logit = tl.where(logit > 0, logit / repetition, logit * repetition)
            logit = logit - frequency * count - tl.where(count > 0, presence, 0.0)
            tl.store(logits_ptr + token, logit, mask=is_mine)
        tl.debug_barrier()
    is_too_short = position < tl.load(changes.min_len + slot)
    for start in range(0, num_entries, _ENTRIES):
        entry = start + tl.arange(0, _ENTRIES)
        inside = entry < num_entries
        value = tl.load(changes.entry_values + slot * entry_stride + entry, mask=inside, other=0.0)
        token = tl.load(changes.entry_ids + slot * entry_stride + entry, mask=inside, other=0)
        is_added = (value != 0) & (value < float("inf")) & ((value > float("-inf")) | is_too_short)
        tl.atomic_add(logits_ptr + token, value, mask=inside & is_added, sem="relaxed")


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _forbid_tokens_kernel(
    logits_ptr,  # [N, M], rows logits_stride apart; changed
    slots_ptr,  # [N] int64
    positions_ptr,  # [N] int32
    changes,  # `LogitChanges`
    logits_stride,
    entry_stride,
    start,
    num_tokens,
    LOWEST: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    num_entries = tl.load(changes.num_forbidden + slot)
    if num_entries > 0:
        is_too_short = tl.load(positions_ptr + row) < tl.load(changes.min_len + slot)
        for first in range(0, num_entries, _ENTRIES):
            entry = first + tl.arange(0, _ENTRIES)
            inside = entry < num_entries
            value = tl.load(changes.entry_values + slot * entry_stride + entry, mask=inside, other=0.0)
            token = tl.load(changes.entry_ids + slot * entry_stride + entry, mask=inside, other=0) - start
            is_stop = value == -float("inf")
            inside &= (token >= 0) & (token < num_tokens) & (is_too_short | (is_stop == 0))
            logits = logits_ptr + row * logits_stride + token
            logit = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
            lowest = tl.where(is_stop, -float("inf"), LOWEST)
            tl.store(logits, tl.where(logit > lowest, lowest, logit).to(logits_ptr.dtype.element_ty), mask=inside)


def forbid_tokens(logits: Tensor, changes: LogitChanges, slots: Tensor, positions: Tensor, *, start: int = 0) -> None:
    """See `nvcli.kernels.logit_changes.forbid_tokens`."""
    assert logits.stride(1) == 1
    if len(logits):
        _forbid_tokens_kernel[(len(logits),)](
            logits,
            slots,
            positions,
            changes,
            logits.stride(0),
            changes.entry_ids.stride(0),
            start,
            logits.shape[1],
            LOWEST=lowest_logit(logits.dtype),
            num_warps=1,
        )


def change_logits(
    logits: Tensor,
    changes: LogitChanges,
    at: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    *,
    num_penalised: int,
    num_entries: int,
) -> None:
    """Change logits as `nvcli.kernels.logit_changes.change_logits` does."""
    if not len(at):
        return
    assert logits.dtype == torch.float32
    assert logits.stride(1) == token_ids.stride(1) == 1
    vocab_size = logits.shape[1]
    counts = torch.zeros(num_penalised, vocab_size, dtype=torch.int32, device=logits.device)
    _change_logits_kernel[(len(at),)](
        logits,
        counts,
        at,
        slots,
        positions,
        token_ids,
        changes,
        logits.stride(0),
        token_ids.stride(0),
        changes.entry_ids.stride(0),
        vocab_size,
        num_penalised,
        num_entries,
        num_warps=8,
    )
