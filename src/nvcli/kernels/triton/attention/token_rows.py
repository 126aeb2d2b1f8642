"""Expands rows of several tokens into rows of one token each, for attention over shared segments, where every token
shares what its row shares, and for attention to chosen keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = tl.constexpr(128)
"""Tokens of a row that are written at a time."""


@triton.jit(do_not_specialize_on_alignment=["starts", "seq_lens", "slots"])
def expand_rows_kernel(
    starts,  # [B + 1] int32, the first token of each row
    seq_lens,  # [B] int32, keys of each row
    slots,  # [B] int64
    token_lens,  # [T] int32, written
    token_slots,  # [T] int64, written
):
    """Program (row)."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    behind = tl.load(seq_lens + row) - end + 1
    slot = tl.load(slots + row)
    for start in tl.range(first, end, _TOKENS):
        tokens = start + tl.arange(0, _TOKENS)
        tl.store(token_lens + tokens, tl.maximum(behind + tokens, 0), mask=tokens < end)
        tl.store(token_slots + tokens, slot + tl.zeros([_TOKENS], tl.int64), mask=tokens < end)


def expand_rows(starts: Tensor, seq_lens: Tensor, slots: Tensor, token_lens: Tensor, token_slots: Tensor) -> None:
    """See `nvcli.kernels.chosen_keys.expand_rows`."""
    expand_rows_kernel[(len(slots),)](starts, seq_lens, slots, token_lens, token_slots, num_warps=1)


class TokenRows(NamedTuple):
    """The slots and lengths of tokens, in memory that is allocated once."""

    lens: Tensor
    """[most tokens] int32, the keys that each token sees, its own included."""
    slots: Tensor
    """[most tokens] int64."""

    @classmethod
    def empty(cls, max_tokens: int, device: torch.device) -> TokenRows:
        """Allocate the memory; every token sees no keys and has slot 0."""
        ints = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        return cls(ints, torch.zeros(max_tokens, dtype=torch.int64, device=device))
