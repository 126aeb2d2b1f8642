"""Expands rows of several tokens into rows of one token each, for attention over shared segments: every token shares
what its row shares, and is placed in tiles as a row is."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.decode_work_list import RowTokens
from nvcli.kernels.whole_numbers import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["starts", "seq_lens", "slots"])
def expand_rows_kernel(
    starts,  # [B + 1] int32, the first token of each row
    seq_lens,  # [B] int32, keys of each row
    slots,  # [B] int64
    token_lens,  # [T] int32, written
    token_slots,  # [T] int64, written
    WIDTH: tl.constexpr,  # at least the tokens of a row
):
    """Program (row)."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    num_tokens = tl.load(starts + row + 1) - first
    number = tl.arange(0, WIDTH)
    is_token = number < num_tokens
    length = tl.load(seq_lens + row) - num_tokens + 1 + number
    tl.store(token_lens + first + number, length, mask=is_token)
    tl.store(token_slots + first + number, tl.load(slots + row) + tl.zeros([WIDTH], tl.int64), mask=is_token)


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

    def fill(self, tokens: RowTokens, seq_lens: Tensor, slots: Tensor) -> None:
        """Write the lengths and slots of the tokens of some rows. seq_lens: [B] int32; slots: [B] int64."""
        width = next_power_of_2(tokens.width)
        expand_rows_kernel[(len(slots),)](tokens.starts, seq_lens, slots, *self, WIDTH=width, num_warps=1)
