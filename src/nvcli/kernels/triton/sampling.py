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
    QUADS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Program (row, chunk): the best score of the chunk's tokens, and the first token that has it."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = index
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + index).to(tl.int64)
    quads = chunk * QUADS + tl.arange(0, QUADS)
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    logits = logits_ptr + index * logits_row_stride + tokens
    score = tl.load(logits, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
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
    first = tl.min(tl.where(score == best, tokens, _NO_TOKEN))
    tl.store(best_score_ptr + index * num_chunks + chunk, best)
    tl.store(best_id_ptr + index * num_chunks + chunk, first)


@triton.jit
def _best_of_row_kernel(best_score_ptr, best_id_ptr, out_ptr, num_chunks, vocab_size, BLOCK: tl.constexpr):
    """Program (row): the best of its chunks, the first token where several are equal."""
    index = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    scores = tl.load(best_score_ptr + index * num_chunks + chunks, mask=inside, other=-float("inf"))
    ids = tl.load(best_id_ptr + index * num_chunks + chunks, mask=inside, other=_NO_TOKEN)
    first = tl.min(tl.where(scores == tl.max(scores), ids, _NO_TOKEN))
    # Where all logits are NaN nothing is equal to the best; what is sampled must be a token all the same.
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
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab_size, 4 * _QUADS)
    best_scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
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
        vocab_size,
        num_chunks,
        QUADS=_QUADS,
        HAS_SLOTS=slots is not None,
        HAS_THRESHOLD=threshold is not None,
        APPROXIMATE=logits.is_cuda,
        num_warps=4,
    )
    block = triton.next_power_of_2(num_chunks)
    _best_of_row_kernel[(num_rows,)](best_scores, best_ids, ids, num_chunks, vocab_size, BLOCK=block, num_warps=1)
    return ids
