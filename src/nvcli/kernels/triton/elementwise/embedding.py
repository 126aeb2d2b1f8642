"""Look-up in one rank's part of an embedding, in Triton: one program for each token, zeros for other ranks' tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.whole_numbers import next_power_of_2, warps_of_row


@triton.jit
def _embed_part_kernel(
    ids_ptr,  # [T] int32
    weight_ptr,  # [num_tokens, SIZE], the rows of the tokens from `start` on
    out_ptr,  # [T, SIZE], written
    start,
    num_tokens,
    SIZE: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64) - start
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    inside = columns < SIZE
    is_mine = (token >= 0) & (token < num_tokens)
    values = tl.load(weight_ptr + token * SIZE + columns, mask=inside & is_mine, other=0.0)
    tl.store(out_ptr + row * SIZE + columns, values, mask=inside)


def embed_part(ids: Tensor, weight: Tensor, start: int, out: Tensor | None = None) -> Tensor:
    """See `nvcli.kernels.embedding.embed_part`."""
    num_tokens, size = weight.shape
    if out is None:
        out = torch.empty(len(ids), size, dtype=weight.dtype, device=weight.device)
    assert weight.is_contiguous()
    assert out.is_contiguous()
    _embed_part_kernel[(len(ids),)](
        ids,
        weight,
        out,
        start,
        num_tokens,
        SIZE=size,
        num_warps=warps_of_row(next_power_of_2(size)),
    )
    return out
