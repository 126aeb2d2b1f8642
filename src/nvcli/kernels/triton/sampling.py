"""Sampling in one pass over the logits: greedy or Gumbel-max, row by row, and no softmax.

All parameters are device tensors and nothing waits for the device, so that it runs inside a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.philox import quad_uniforms

_QUADS = 512
"""Groups of four tokens that one program looks at."""
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_WORST_SCORE = tl.constexpr(-0x80000000)


@triton.jit
def _log2(x, APPROXIMATE: tl.constexpr):
    """With APPROXIMATE by the GPU's own instruction, right to 2^-22, where libdevice takes 25 instructions."""
    if APPROXIMATE:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _gumbel(uniform, APPROXIMATE: tl.constexpr):
    """-log(-log(uniform)), to about 1e-6. The largest noise, which wins, comes from numbers next to 1, of which an
    approximate logarithm says nothing: there it is the series of -log(1 - rest), and `rest` is exact."""
    LOG_2: tl.constexpr = 0.6931471805599453
    rest = 1.0 - uniform
    series = 1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5 + rest * (1 / 6 + rest * (1 / 7)))))
    series = rest + rest * rest * series
    return -LOG_2 * _log2(tl.where(rest < 0.125, series, -LOG_2 * _log2(uniform, APPROXIMATE)), APPROXIMATE)


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    rows_ptr,
    samples_ptr,
    slots_ptr,
    threshold_ptr,
    best_score_ptr,
    best_id_ptr,
    logits_row_stride,
    vocab_size,
    num_chunks,
    start,
    QUADS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    SHARDED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Program (row, chunk): the best score of the chunk's tokens, and the first token that has it. With SHARDED the
    logits are those of tokens `start` to `vocab_size`, and chunks are counted from the quad of `start`."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = index
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + index).to(tl.int64)
    quads = chunk * QUADS + tl.arange(0, QUADS)
    if SHARDED:
        quads += start // 4
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    logits = logits_ptr + index * logits_row_stride + tokens
    inside = tokens < vocab_size
    if SHARDED:
        logits -= start
        inside &= tokens >= start
    score = tl.load(logits, mask=inside, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0:
        uniforms = quad_uniforms(
            quads,
            tl.load(seeds_ptr + slot),
            tl.load(positions_ptr + index),
            tl.load(rows_ptr + slot),
            tl.load(samples_ptr + slot),
        )
        noisy = score * (1.0 / temperature) + _gumbel(uniforms, APPROXIMATE)
        if HAS_THRESHOLD:
            # The same division, rounded the same way, as that which made the threshold.
            is_likely = tl.div_rn(score, temperature) >= tl.load(threshold_ptr + index)
            noisy = tl.where(is_likely, noisy, -float("inf"))
        score = noisy
    best = tl.max(score)
    is_best = score == best
    if SHARDED:  # elsewhere what lies outside comes last, and is told by its id
        is_best &= inside
    first = tl.min(tl.where(is_best, tokens, _NO_TOKEN))
    tl.store(best_score_ptr + index * num_chunks + chunk, best)
    tl.store(best_id_ptr + index * num_chunks + chunk, first)


@triton.jit
def _best_of_row_kernel(
    best_score_ptr, best_id_ptr, out_ptr, num_chunks, vocab_size, BLOCK: tl.constexpr, AS_KEY: tl.constexpr
):
    """Program (row): the best of its chunks, the first token where several are equal; with AS_KEY its key."""
    index = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    scores = tl.load(best_score_ptr + index * num_chunks + chunks, mask=inside, other=-float("inf"))
    ids = tl.load(best_id_ptr + index * num_chunks + chunks, mask=inside, other=_NO_TOKEN)
    best = tl.max(scores)
    first = tl.min(tl.where(scores == best, ids, _NO_TOKEN))
    # Where all logits are NaN nothing is equal to the best; what is sampled must be a token all the same.
    if AS_KEY:
        bits = tl.where(best == 0, 0.0, best).to(tl.int32, bitcast=True)  # both zeros are equal
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        ordered = tl.where(first == _NO_TOKEN, _WORST_SCORE, ordered)
        token = tl.where(first == _NO_TOKEN, 0, first)
        tl.store(out_ptr + index, (ordered << 32) | (token ^ _NO_TOKEN).to(tl.int64))
    else:
        tl.store(out_ptr + index, tl.where(first < vocab_size, first, 0))


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    *,
    slots: Tensor | None,
    threshold: Tensor | None,
) -> Tensor:
    """See `nvcli.kernels.sampling.sample`."""
    ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _launch(logits, temperature, seeds, positions, rows, samples, slots, threshold, ids, start=None)
    return ids


def best_keys(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    *,
    slots: Tensor | None,
    start: int,
) -> Tensor:
    """See `nvcli.kernels.sampling.best_keys`."""
    keys = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(logits, temperature, seeds, positions, rows, samples, slots, None, keys, start=start)
    return keys


def _launch(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    slots: Tensor | None,
    threshold: Tensor | None,
    out: Tensor,
    *,
    start: int | None,
) -> None:
    """`start`: of the tokens that `logits` are for, where they are a part of the vocabulary; then `out` are keys."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    is_sharded, start = start is not None, start or 0
    num_chunks = max(1, triton.cdiv(start % 4 + num_tokens, 4 * _QUADS))
    best_scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    _best_of_chunk_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        seeds,
        positions,
        rows,
        samples,
        positions if slots is None else slots,
        temperature if threshold is None else threshold,
        best_scores,
        best_ids,
        logits.stride(0),
        start + num_tokens,
        num_chunks,
        start,
        QUADS=_QUADS,
        HAS_SLOTS=slots is not None,
        HAS_THRESHOLD=threshold is not None,
        SHARDED=is_sharded,
        APPROXIMATE=logits.is_cuda,
        num_warps=4,
    )
    _best_of_row_kernel[(num_rows,)](
        best_scores,
        best_ids,
        out,
        num_chunks,
        start + num_tokens,
        BLOCK=triton.next_power_of_2(num_chunks),
        AS_KEY=is_sharded,
        num_warps=1,
    )
