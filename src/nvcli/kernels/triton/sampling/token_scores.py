"""Scores of given tokens by a shard of their logits, in Triton: one pass over each row, without a copy in float32.

Each lane of a program keeps the largest logit of its columns, where that was, and the sum of the exponentials below it
(the online softmax of Milakov and Gimelshein, arXiv:1805.02867); the lanes are joined at the end of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(4096)
_WARPS = 8


@triton.jit
def _token_scores_kernel(
    logits_ptr,  # [N, M], rows row_stride apart
    targets_ptr,  # [N] int64
    log_sum_ptr,  # [N] float32, written
    target_ptr,  # [N] float32, written
    top_ptr,  # [N] float32, written
    top_id_ptr,  # [N] int32, written
    row_stride,
    start,
    num_tokens,
):
    """Program (row). A NaN among the logits makes the sum NaN, and is no largest logit."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    columns = tl.arange(0, _BLOCK)
    highest = tl.full((_BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((_BLOCK,), dtype=tl.float32)
    best = tl.zeros((_BLOCK,), dtype=tl.int32)
    for first in range(0, num_tokens, _BLOCK):
        tokens = first + columns
        logit = tl.load(logits_ptr + tokens, mask=tokens < num_tokens, other=-float("inf")).to(tl.float32)
        best = tl.where(logit > highest, tokens, best)
        raised = tl.where(logit > highest, logit, highest)
        shift = tl.where(raised > -float("inf"), raised, 0.0)
        total = total * tl.exp(highest - shift) + tl.exp(logit - shift)
        highest = raised
    largest = tl.max(highest, axis=0)
    shift = tl.where(largest > -float("inf"), largest, 0.0)
    log_sum = tl.log(tl.sum(total * tl.exp(highest - shift), axis=0)) + shift
    first_best = tl.min(tl.where(highest == largest, best, 0x7FFFFFFF), axis=0)
    place = tl.load(targets_ptr + row) - start
    is_here = (place >= 0) & (place < num_tokens)
    target = tl.load(logits_ptr + place, mask=is_here, other=-float("inf")).to(tl.float32)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(target_ptr + row, target)
    tl.store(top_ptr + row, largest)
    tl.store(top_id_ptr + row, first_best + start)


def token_scores(logits: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `nvcli.kernels.token_scores.ShardScores` for K = 1, the last two as [N]. M is at least 1."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    log_sum, target, top = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    top_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        _token_scores_kernel[(num_rows,)](
            logits,
            targets,
            log_sum,
            target,
            top,
            top_ids,
            logits.stride(0),
            start,
            num_tokens,
            num_warps=_WARPS,
        )
    return log_sum, target, top, top_ids
