"""Top-k, top-p and min-p without a sort: each is a threshold on the logit, and a threshold can be searched for.

Both searches are one: find the smallest value v for which the total weight of the tokens above v is less than a limit.
For top-k each token weighs 1 and the limit is k; for top-p it weighs its probability and the limit is p. The weight
falls as v grows, so bisection over the bit patterns of the logits' own type finds v exactly: it is a logit of the row.

The kernel here searches whole rows, for limits that may keep many tokens: it tries three values in a pass over the row,
and bounds that cost no pass make the passes few. `candidates.py` searches the few tokens that a small top-k can keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.sampling_columns import SamplingColumns

_LANES = tl.constexpr(1024)
"""A program looks at this many lanes at once, one in each thread: as many neighbouring logits as one load brings."""
_LOAD_BYTES = 16


@triton.jit
def to_key(value, dtype: tl.constexpr):
    """Turn a value of type `dtype` (held in float32) into an integer of the same order, from its bits: float32 →
    int64."""
    if dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = value.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
    return key.to(tl.int64)


@triton.jit
def from_key(key, dtype: tl.constexpr):
    """Turn a key of `to_key` back into its value: int64 → float32."""
    bits = key.to(tl.int32)
    if dtype == tl.float32:
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        value = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return value


@triton.jit
def smallest_value(values, weights, lowest, highest, limit, dtype: tl.constexpr):
    """Find the smallest value v, from `lowest` to `highest`, for which the tokens above v weigh less than `limit`.

    values and weights: float32 of one shape, in registers; the values are of type `dtype`, and so is v. Nothing may be
    above `highest`.
    """
    low_key, high_key = to_key(lowest, dtype), to_key(highest, dtype)
    while low_key < high_key:
        middle = low_key + (high_key - low_key) // 2
        fits = tl.sum(tl.where(values > from_key(middle, dtype), weights, 0.0)) < limit
        high_key = tl.where(fits, middle, high_key)
        low_key = tl.where(fits, low_key, middle + 1)
    return from_key(high_key, dtype)


@triton.jit
def min_kept(values, weights, mass, kth, top, temperature, top_p, min_p, dtype: tl.constexpr):
    """Find the smallest logit / temperature that top-k, top-p and min-p keep, for tokens in registers.

    values: float32 logits of type `dtype`; weights: of the same shape, their probabilities times any factor, 0 where
    top-k leaves a token out; mass: the sum of all weights, of tokens elsewhere too, which are not above `kth`; kth: the
    smallest logit that top-k keeps; top: the largest logit.
    """
    # log(0) is -inf: min-p is off.
    least = tl.maximum(tl.div_rn(kth, temperature), tl.div_rn(top, temperature) + tl.log(min_p))
    if top_p < 1:
        value = smallest_value(values, weights, kth, top, top_p * mass, dtype)
        least = tl.maximum(least, tl.div_rn(value, temperature))
    return least


@triton.jit
def _load(row_ptr, start, vocab_size, WIDTH: tl.constexpr):
    """Load the logits from `start` on, -inf behind the vocabulary's end: → [_LANES, WIDTH] float32."""
    tokens = start + tl.arange(0, _LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def _lane_maxima(row_ptr, vocab_size, WIDTH: tl.constexpr):
    """Find the largest logit that each lane meets: → [_LANES] float32."""
    # Reduced behind the loop, not in it: for that Triton 3.6 has an optimisation that fails on this kernel.
    maxima = tl.full([_LANES, WIDTH], -float("inf"), tl.float32)
    for start in range(0, vocab_size, _LANES * WIDTH):
        maxima = tl.maximum(maxima, _load(row_ptr, start, vocab_size, WIDTH))
    return tl.max(maxima, axis=1)


@triton.jit
def _mass_from(row_ptr, vocab_size, value, top, scale, WIDTH: tl.constexpr):
    """Sum exp((logit - top) / temperature) over the tokens with a logit of at least `value`; `scale` is log2(e) over
    the temperature. → scalar float32."""
    mass = tl.zeros([_LANES], tl.float32)
    for start in range(0, vocab_size, _LANES * WIDTH):
        logits = _load(row_ptr, start, vocab_size, WIDTH)
        mass += tl.sum(tl.where(logits >= value, tl.exp2((logits - top) * scale), 0.0), axis=1)
    return tl.sum(mass, axis=0)


@triton.jit
def _smallest_value_of_row(
    row_ptr,  # [vocab_size], one row of logits
    vocab_size,
    lowest,  # key (`to_key`)
    highest,  # key
    limit,
    top,  # the row's largest logit
    scale,  # log2(e) / temperature
    BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find the smallest value v, between two keys, for which the tokens of the row above v weigh less than `limit`.

    BY_MASS, a token weighs exp((logit - top) / temperature), else 1. Nothing may be above the value of `highest`.
    """
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    while lowest < highest:
        span = highest - lowest
        low, middle, high = lowest + span // 4, lowest + span // 2, lowest + span * 3 // 4
        low_value, middle_value, high_value = from_key(low, dtype), from_key(middle, dtype), from_key(high, dtype)
        above_low = tl.zeros([_LANES], tl.float32)
        above_middle = tl.zeros([_LANES], tl.float32)
        above_high = tl.zeros([_LANES], tl.float32)
        for start in range(0, vocab_size, _LANES * WIDTH):
            logits = _load(row_ptr, start, vocab_size, WIDTH)
            weights = tl.exp2((logits - top) * scale) if BY_MASS else tl.full([_LANES, WIDTH], 1.0, tl.float32)
            above_low += tl.sum(tl.where(logits > low_value, weights, 0.0), axis=1)
            above_middle += tl.sum(tl.where(logits > middle_value, weights, 0.0), axis=1)
            above_high += tl.sum(tl.where(logits > high_value, weights, 0.0), axis=1)
        low_fits = tl.sum(above_low, axis=0) < limit
        middle_fits = tl.sum(above_middle, axis=0) < limit
        high_fits = tl.sum(above_high, axis=0) < limit
        highest = tl.where(low_fits, low, tl.where(middle_fits, middle, tl.where(high_fits, high, highest)))
        lowest = tl.where(low_fits, lowest, tl.where(middle_fits, low + 1, tl.where(high_fits, middle + 1, high + 1)))
    return from_key(highest, dtype)


@triton.jit
def _min_kept_logit_kernel(
    logits_ptr,  # [N, vocab_size], rows logits_row_stride apart
    columns,  # `SamplingColumns`
    slots_ptr,  # [N] int64
    out_ptr,  # [N] float32, written
    logits_row_stride,
    vocab_size,
    EXCEPT_TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (row). Rows whose top-k is on and at most EXCEPT_TOP_K get -inf."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + index)
    temperature = tl.load(columns.temperature + slot)
    top_k = tl.load(columns.top_k + slot)
    top_p = tl.load(columns.top_p + slot)
    min_p = tl.load(columns.min_p + slot)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1
    is_ours = (top_k <= 0) | (top_k > EXCEPT_TOP_K)
    bottom = tl.full([], -float("inf"), tl.float32)
    threshold = bottom
    if (temperature > 0) & (by_k | by_p | (min_p > 0)) & is_ours:
        row_ptr = logits_ptr + index * logits_row_stride
        scale = 1.4426950408889634 / temperature
        maxima = _lane_maxima(row_ptr, vocab_size, WIDTH)
        top = tl.max(maxima, axis=0)
        # A row without a finite maximum gets no token (`sampling.py`), and needs no threshold.
        is_finite = (top > -float("inf")) & (top < float("inf"))
        by_k &= is_finite
        by_p &= is_finite
        threshold = tl.where(is_finite, tl.div_rn(top, temperature) + tl.log(min_p), bottom)  # log(0) is -inf: off
        highest = to_key(top, dtype)
        if by_k:
            # A row's k-th largest is at least the k-th largest of its lanes' maxima, and seldom far from it.
            limit = top_k.to(tl.float32)
            least = smallest_value(maxima, tl.full([_LANES], 1.0, tl.float32), bottom, top, limit, dtype)
            lowest = to_key(least, dtype)
            bottom = _smallest_value_of_row(row_ptr, vocab_size, lowest, highest, limit, top, scale, False, WIDTH)
            threshold = tl.maximum(threshold, tl.div_rn(bottom, temperature))
        if by_p:
            mass = _mass_from(row_ptr, vocab_size, bottom, top, scale, WIDTH)
            # Below this value even the whole vocabulary would weigh less than 1 - p; the mass is at least 1.
            least = top - temperature * (tl.log(vocab_size * 1.0) - tl.log(1 - top_p))
            lowest = tl.minimum(to_key(least, dtype) - 1, highest)
            lowest = tl.maximum(lowest, to_key(bottom, dtype))
            limit = top_p * mass
            value = _smallest_value_of_row(row_ptr, vocab_size, lowest, highest, limit, top, scale, True, WIDTH)
            threshold = tl.maximum(threshold, tl.div_rn(value, temperature))
    tl.store(out_ptr + index, threshold)


def min_kept_logit(logits: Tensor, columns: SamplingColumns, slots: Tensor, *, except_top_k: int = 0) -> Tensor:
    """Find the smallest logit / temperature that top-k, top-p and min-p keep in each row.

    logits: [N, V], rows may lie apart; slots: [N] int64, the row of `columns` that each row of logits takes. → [N]
    float32, -inf where the temperature is 0, where nothing limits, and where top-k is on and at most `except_top_k`.
    Rows that get -inf cost next to nothing.

    The thresholds are exact (see `nvcli.kernels.sampling.min_kept_logit`), but for top-p's, which is exact up to the
    order in which probabilities are added: a token may be in or out where the mass of the likelier ones equals top_p to
    about 1e-6.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _min_kept_logit_kernel[(num_rows,)](
        logits,
        columns,
        slots,
        out,
        logits.stride(0),
        vocab_size,
        EXCEPT_TOP_K=except_top_k,
        WIDTH=_LOAD_BYTES // logits.element_size(),
        num_warps=_LANES.value // 32,
    )
    return out
