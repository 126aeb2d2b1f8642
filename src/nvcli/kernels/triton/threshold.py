"""Top-k, top-p and min-p without a sort: each is a threshold on the logit, and a threshold can be searched for.

Both searches ask for the smallest value of which the tokens above it weigh less than a limit: for top-k each weighs 1
and the limit is k; for top-p each weighs its probability and the limit is p. The weight falls as the value grows, so
bisection over the bit patterns of the logits' own type finds that value exactly: it is a logit of the row. Three values
are tried in a pass over the row. Bounds that cost no pass make the passes few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 1024
"""A program looks at this many lanes at once, one in each thread: as many neighbouring logits as one load brings."""
_LOAD_BYTES = 16


@triton.jit
def _to_key(value, dtype: tl.constexpr):
    """Bits of a value of type `dtype` (held in float32) as a number that grows with it. Scalar float32 → int64."""
    if dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = value.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
    return key.to(tl.int64)


@triton.jit
def _from_key(key, dtype: tl.constexpr):
    """The inverse of `_to_key`."""
    bits = key.to(tl.int32)
    if dtype == tl.float32:
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        value = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _load(row_ptr, start, vocab_size, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """[LANES, WIDTH] float32 logits from `start` on, -inf behind the vocabulary's end."""
    tokens = start + tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def _lane_maxima(row_ptr, vocab_size, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """[LANES]: the largest logit that each lane meets."""
    # Reduced behind the loop, not in it: for that Triton 3.6 has an optimisation that fails on this kernel.
    maxima = tl.full([LANES, WIDTH], -float("inf"), tl.float32)
    for start in range(0, vocab_size, LANES * WIDTH):
        maxima = tl.maximum(maxima, _load(row_ptr, start, vocab_size, LANES, WIDTH))
    return tl.max(maxima, axis=1)


@triton.jit
def _mass_from(row_ptr, vocab_size, value, top, scale, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Weight of the tokens of at least `value`: the sum of exp((logit - top) / temperature)."""
    mass = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab_size, LANES * WIDTH):
        logits = _load(row_ptr, start, vocab_size, LANES, WIDTH)
        mass += tl.sum(tl.where(logits >= value, tl.exp2((logits - top) * scale), 0.0), axis=1)
    return tl.sum(mass, axis=0)


@triton.jit
def _smallest_value(
    row_ptr,
    vocab_size,
    lowest,
    highest,
    limit,
    top,
    scale,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The smallest value, between two keys, of which the tokens above weigh less than `limit`; `highest` is one."""
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    while lowest < highest:
        span = highest - lowest
        low, middle, high = lowest + span // 4, lowest + span // 2, lowest + span * 3 // 4
        low_value, middle_value, high_value = _from_key(low, dtype), _from_key(middle, dtype), _from_key(high, dtype)
        above_low = tl.zeros([LANES], tl.float32)
        above_middle = tl.zeros([LANES], tl.float32)
        above_high = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab_size, LANES * WIDTH):
            logits = _load(row_ptr, start, vocab_size, LANES, WIDTH)
            weights = tl.exp2((logits - top) * scale) if BY_MASS else tl.full([LANES, WIDTH], 1.0, tl.float32)
            above_low += tl.sum(tl.where(logits > low_value, weights, 0.0), axis=1)
            above_middle += tl.sum(tl.where(logits > middle_value, weights, 0.0), axis=1)
            above_high += tl.sum(tl.where(logits > high_value, weights, 0.0), axis=1)
        low_fits = tl.sum(above_low, axis=0) < limit
        middle_fits = tl.sum(above_middle, axis=0) < limit
        high_fits = tl.sum(above_high, axis=0) < limit
        highest = tl.where(low_fits, low, tl.where(middle_fits, middle, tl.where(high_fits, high, highest)))
        lowest = tl.where(low_fits, lowest, tl.where(middle_fits, low + 1, tl.where(high_fits, middle + 1, high + 1)))
    return _from_key(highest, dtype)


@triton.jit
def _kth_largest(values, lowest, highest, k, dtype: tl.constexpr):
    """Key of the k-th largest of `values`, which are in registers; `lowest` where there are fewer than k."""
    while lowest < highest:
        middle = lowest + (highest - lowest) // 2
        fits = tl.sum((values > _from_key(middle, dtype)).to(tl.int32), axis=0) < k
        highest = tl.where(fits, middle, highest)
        lowest = tl.where(fits, lowest, middle + 1)
    return highest


@triton.jit
def _likely_threshold_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    slots_ptr,
    out_ptr,
    logits_row_stride,
    vocab_size,
    HAS_SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (row)."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    slot = index
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + index).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1
    bottom = tl.full([], -float("inf"), tl.float32)
    threshold = bottom
    if (temperature > 0) & (by_k | by_p | (min_p > 0)):
        row_ptr = logits_ptr + index * logits_row_stride
        scale = 1.4426950408889634 / temperature
        maxima = _lane_maxima(row_ptr, vocab_size, LANES, WIDTH)
        top = tl.max(maxima, axis=0)
        threshold = tl.div_rn(top, temperature) + tl.log(min_p)  # log(0) is -inf: off
        highest = _to_key(top, dtype)
        if by_k:
            # A row's k-th largest is at least the k-th largest of its lanes' maxima, and seldom far from it.
            lowest = _kth_largest(maxima, _to_key(bottom, dtype), highest, top_k, dtype)
            bottom = _smallest_value(
                row_ptr, vocab_size, lowest, highest, top_k.to(tl.float32), top, scale, False, LANES, WIDTH
            )
            threshold = tl.maximum(threshold, tl.div_rn(bottom, temperature))
        if by_p:
            mass = _mass_from(row_ptr, vocab_size, bottom, top, scale, LANES, WIDTH)
            # Below this value even the whole vocabulary would weigh less than 1 - p; the mass is at least 1.
            least = top - temperature * (tl.log(vocab_size * 1.0) - tl.log(1 - top_p))
            lowest = tl.minimum(_to_key(least, dtype) - 1, highest)
            lowest = tl.maximum(lowest, _to_key(bottom, dtype))
            value = _smallest_value(row_ptr, vocab_size, lowest, highest, top_p * mass, top, scale, True, LANES, WIDTH)
            threshold = tl.maximum(threshold, tl.div_rn(value, temperature))
    tl.store(out_ptr + index, threshold)


def likely_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, slots: Tensor | None
) -> Tensor:
    """See `nvcli.kernels.sampling.likely_threshold`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _likely_threshold_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        top_k if slots is None else slots,
        out,
        logits.stride(0),
        vocab_size,
        HAS_SLOTS=slots is not None,
        LANES=_LANES,
        WIDTH=_LOAD_BYTES // logits.element_size(),
        num_warps=_LANES // 32,
    )
    return out
