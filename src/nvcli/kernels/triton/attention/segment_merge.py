"""Merges the attention results of rows over the segments that they share into those over their own keys.

Each result is the weighted mean of values over some keys of a row, and counts by the log of its sum of weights
(log-sum-exp). Shapes: R rows, H query heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_ELEMENTS = 2048
"""Elements of the output that a program merges."""


class SegmentResults(NamedTuple):
    """The partial results of rows over the segments that they share (`segment_attention.py`)."""

    out: Tensor
    """[partial results, KV, H / KV, D]."""
    lse: Tensor
    """[partial results, KV, H / KV] float32, the log-sum-exp of the scores, base 2."""
    firsts: Tensor
    """[at least R] int32, the first partial result of each row."""
    counts: Tensor
    """[at least R] int32, the number of each row's partial results."""


@triton.jit
def merge_segments_kernel(
    out,  # [R, H, D], contiguous: of the rows' own keys, and then of all
    log_sums,  # [R, H] float32, base 2, of the rows' own keys
    results,  # `SegmentResults`
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (row, HEADS query heads)."""
    row = tl.program_id(0)
    count = tl.load(results.counts + row)
    if count == 0:
        return
    first = tl.load(results.firsts + row).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    elements = heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    out_places = out + row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + elements
    highest = tl.load(log_sums + row * NUM_HEADS + heads, mask=is_head, other=0.0)
    weight_sum = tl.full([HEADS], 1.0, tl.float32)
    acc = tl.load(out_places, mask=is_head[:, None], other=0.0).to(tl.float32)
    for number in tl.range(0, count, num_stages=1):
        place = first + number
        lse = tl.load(results.lse + place * NUM_HEADS + heads, mask=is_head, other=0.0)
        value = tl.load(results.out + place * (NUM_HEADS * HEAD_DIM) + elements, mask=is_head[:, None], other=0.0)
        new_highest = tl.maximum(highest, lse)
        decay = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest)
        weight_sum = weight_sum * decay + weight
        acc = acc * decay[:, None] + value.to(tl.float32) * weight[:, None]
        highest = new_highest
    tl.store(out_places, (acc / weight_sum[:, None]).to(out.dtype.element_ty), mask=is_head[:, None])


def merge_segments(out: Tensor, log_sums: Tensor, results: SegmentResults) -> None:
    """Merge results over segments into `out`, [R, H, D], contiguous, which holds the rows' results over their own keys.
    log_sums: at least [R, H] float32, the log-sum-exp of the scores of those keys, base 2."""
    num_rows, num_heads, head_dim = out.shape
    assert out.is_contiguous()
    heads = min(next_power_of_2(num_heads), max(1, _ELEMENTS // head_dim))
    merge_segments_kernel[num_rows, ceil_div(num_heads, heads)](
        out, log_sums, results, NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEADS=heads, num_warps=4
    )
