"""Sampling in one pass over the logits, without a softmax: greedy, Gumbel-max, and with limits, as each row asks.

Three kernels, in this order: thresholds for the rows whose limits may keep many tokens (`top_k_top_p.py`); a pass over
all logits in chunks, which leaves the best token of each chunk, or for rows with a small top-k the maxima of groups;
and a program for each row that makes the choice from those (`candidates.py`). Every row decides on the device what it
needs. All parameters are device tensors, grids follow from shapes alone, and nothing waits for the device, so that all
of it runs inside a CUDA graph.

Shapes: N rows, M tokens `start` to `end`, the whole vocabulary or a shard of it; chunks and groups are counted from the
quad that `start` lies in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.sampling_columns import LIST_WIDTH, MAX_CANDIDATES, SamplingColumns
from nvcli.kernels.triton.sampling.candidates import (
    GROUP_TOKENS,
    LISTED_GROUPS,
    NO_CHOICE,
    NO_TOKEN,
    best_listed,
    better,
    has_small_top_k,
    list_groups,
    min_kept_of_candidates,
    store_list,
    top_k_candidates,
)
from nvcli.kernels.triton.sampling.philox import draw_of, gumbel, quad_uniforms
from nvcli.kernels.triton.sampling.top_k_top_p import min_kept_logit

_QUADS = tl.constexpr(512)
"""Quads (groups of four tokens) that one program of the pass looks at."""
_CHUNK_GROUPS = tl.constexpr(4 * _QUADS.value // GROUP_TOKENS.value)
"""Groups of these."""
_LIST_WIDTH = tl.constexpr(LIST_WIDTH)
_ROW_WARPS = 16
_MAX_REGISTERS = 64
"""The registers that a thread may use. Without a limit the compiler takes more, and too few programs run at a time."""


@triton.jit
def _sample_chunk_kernel(
    logits_ptr,  # [N, M], rows logits_row_stride apart
    columns,  # `SamplingColumns`
    slots_ptr,  # [N] int64
    positions_ptr,  # [N]
    min_kept_ptr,  # None, or [N] float32
    best_score_ptr,  # [N, num_chunks] float32, written
    best_token_ptr,  # [N, num_chunks] int32, written
    maxima_ptr,  # [N, num_chunks × groups of a chunk] of the logits' type, written; None: not wanted
    logits_row_stride,
    start,
    end,
    num_chunks,
    FEW_ALLOWED: tl.constexpr,
    SHARDED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Program (row, chunk) finds the best score of the chunk's tokens, and the first token that has it; for a row with
    a small top-k the maxima of the chunk's groups instead. A NaN counts as +inf. With FEW_ALLOWED it draws nothing for
    a chunk that is all -inf. Without SHARDED, `start` is 0."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots_ptr + index)
    quads = chunk * _QUADS + tl.arange(0, _QUADS)
    if SHARDED:
        quads += start // 4
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    logits = logits_ptr + index * logits_row_stride + tokens
    inside = tokens < end
    if SHARDED:
        logits -= start
        inside &= tokens >= start
    score = tl.load(logits, mask=inside, other=-float("inf")).to(tl.float32)
    score = tl.where(score < float("inf"), score, float("inf"))  # maxima pass over a NaN
    temperature = tl.load(columns.temperature + slot)
    if has_small_top_k(temperature, tl.load(columns.top_k + slot)):
        if maxima_ptr is not None:
            maxima = tl.max(tl.reshape(score, (_CHUNK_GROUPS, GROUP_TOKENS)), axis=1)
            groups = (index * num_chunks + chunk) * _CHUNK_GROUPS + tl.arange(0, _CHUNK_GROUPS)
            tl.store(maxima_ptr + groups, maxima.to(maxima_ptr.dtype.element_ty))
    else:
        draws = temperature > 0
        if FEW_ALLOWED:
            draws &= tl.max(score) > -float("inf")
        if draws:
            uniforms = quad_uniforms(quads, draw_of(columns, slot, tl.load(positions_ptr + index)))
            noisy = score * (1.0 / temperature) + gumbel(uniforms, APPROXIMATE)
            if min_kept_ptr is not None:
                min_kept = tl.load(min_kept_ptr + index)
                if min_kept > -float("inf"):  # most rows need no division
                    # The same division, rounded the same way, as that which made the threshold.
                    noisy = tl.where(tl.div_rn(score, temperature) >= min_kept, noisy, -float("inf"))
            score = noisy
        best = tl.max(score)
        is_best = score == best
        if SHARDED:  # elsewhere what lies outside comes last, and is told by its id
            is_best &= inside
        first = tl.min(tl.where(is_best, tokens, NO_TOKEN))
        tl.store(best_score_ptr + index * num_chunks + chunk, best)
        tl.store(best_token_ptr + index * num_chunks + chunk, first)


@triton.jit
def _sample_row_kernel(
    logits_ptr,  # [N, M], rows logits_row_stride apart
    columns,  # `SamplingColumns`
    slots_ptr,  # [N] int64
    positions_ptr,  # [N]
    best_score_ptr,  # [N, num_chunks] float32
    best_token_ptr,  # [N, num_chunks] int32
    maxima_ptr,  # [N, num_chunks × groups of a chunk] of the logits' type; None: no row has a small top-k
    groups_ptr,  # [N, LISTED_GROUPS] int32, scratch memory, with maxima
    out_ptr,  # [N] int32, or with SHARDED int64; written
    lists_ptr,  # [N, LIST_WIDTH] int32, written with SHARDED and maxima
    logits_row_stride,
    start,
    end,
    num_chunks,
    CHUNKS: tl.constexpr,
    SHARDED: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Program (row) chooses the best of its chunks, the first token where several are equal; for a row with a small
    top-k it chooses among the candidates. With SHARDED it gives the number of `packed_argmax`, and the list of
    candidates. Where the best is not finite (a logit is NaN or +inf, or all are -inf), it chooses nothing."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + index)
    temperature = tl.load(columns.temperature + slot)
    top_k = tl.load(columns.top_k + slot)
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    if has_small_top_k(temperature, top_k):
        if maxima_ptr is not None:
            shard = (logits_ptr + index * logits_row_stride, start, end)
            groups_ptr += index * LISTED_GROUPS
            draw = draw_of(columns, slot, tl.load(positions_ptr + index))
            maxima_ptr += index * num_chunks * _CHUNK_GROUPS
            num_listed, level, top, all_fit = list_groups(
                maxima_ptr, groups_ptr, top_k, start, end, CHUNKS * _CHUNK_GROUPS
            )
            listed = (groups_ptr, num_listed)
            values, kth, tie_count, tie_score, tie_token = top_k_candidates(
                shard, listed, (level, top, all_fit), temperature, top_k, draw, APPROXIMATE
            )
            if SHARDED:
                least = kth
            else:
                top_p, min_p = tl.load(columns.top_p + slot), tl.load(columns.min_p + slot)
                dtype: tl.constexpr = logits_ptr.dtype.element_ty
                least = min_kept_of_candidates(values, kth, top, tie_count, temperature, top_p, min_p, dtype)
            score, token = best_listed(shard, listed, least, temperature, draw, SHARDED, APPROXIMATE)
            if SHARDED:
                score, token = better(score, token, tie_score, tie_token)
                lists_ptr += index * _LIST_WIDTH
                store_list(lists_ptr, shard, listed, kth, tie_count, token)
                score, token = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)  # the list says more
            elif (tie_count > 0) & (tl.div_rn(kth, temperature) >= least):
                score, token = better(score, token, tie_score, tie_token)
            best = tl.where(top < float("inf"), score, top)
    else:
        chunks = tl.arange(0, CHUNKS)
        inside = chunks < num_chunks
        all_scores = tl.load(best_score_ptr + index * num_chunks + chunks, mask=inside, other=-float("inf"))
        all_tokens = tl.load(best_token_ptr + index * num_chunks + chunks, mask=inside, other=NO_TOKEN)
        best = tl.max(all_scores)
        token = tl.min(tl.where(all_scores == best, all_tokens, NO_TOKEN))
    token = tl.where((best > -float("inf")) & (best < float("inf")), token, NO_CHOICE)
    if SHARDED:
        bits = tl.where(best == 0, 0.0, best).to(tl.int32, bitcast=True)  # both zeros are equal
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        low_word = (token ^ NO_TOKEN).to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(out_ptr + index, (ordered << 32) | low_word)
    else:
        tl.store(out_ptr + index, token)


def sample(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, few_allowed: bool = False
) -> Tensor:
    """See `nvcli.kernels.sampling.sample`."""
    threshold = min_kept_logit(logits, columns, slots, except_top_k=MAX_CANDIDATES)
    return _launch(logits, columns, slots, positions, threshold=threshold, few_allowed=few_allowed)


def packed_argmax(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, start: int = 0
) -> Tensor:
    """See `nvcli.kernels.sampling.packed_argmax`."""
    return _launch(logits, columns, slots, positions, start=start)


def shard_candidates(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, start: int
) -> tuple[Tensor, Tensor]:
    """See `nvcli.kernels.candidates.shard_candidates`."""
    lists = torch.empty(logits.shape[0], LIST_WIDTH, dtype=torch.int32, device=logits.device)
    return _launch(logits, columns, slots, positions, lists, start=start), lists


def _launch(
    logits: Tensor,
    columns: SamplingColumns,
    slots: Tensor,
    positions: Tensor,
    lists: Tensor | None = None,
    *,
    threshold: Tensor | None = None,
    start: int | None = None,
    few_allowed: bool = False,
) -> Tensor:
    """Launch the pass and the choice. `start` is the first token of a shard, of which packed numbers are returned; with
    None, `logits` is the whole vocabulary, of which tokens are. With `lists` these are written, too."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    device = logits.device
    is_sharded, start = start is not None, start or 0
    out = torch.empty(num_rows, dtype=torch.int64 if is_sharded else torch.int32, device=device)
    has_candidates = lists is not None or not is_sharded
    num_chunks = max(1, triton.cdiv(start % 4 + num_tokens, 4 * _QUADS.value))
    best_scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    best_tokens = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    maxima = groups = None
    if has_candidates:
        maxima = torch.empty(num_rows, num_chunks * _CHUNK_GROUPS.value, dtype=logits.dtype, device=device)
        groups = torch.empty(num_rows, LISTED_GROUPS.value, dtype=torch.int32, device=device)
    _sample_chunk_kernel[(num_rows, num_chunks)](
        logits,
        columns,
        slots,
        positions,
        threshold,
        best_scores,
        best_tokens,
        maxima,
        logits.stride(0),
        start,
        start + num_tokens,
        num_chunks,
        FEW_ALLOWED=few_allowed,
        SHARDED=is_sharded,
        APPROXIMATE=logits.is_cuda,
        maxnreg=_MAX_REGISTERS,
    )
    _sample_row_kernel[(num_rows,)](
        logits,
        columns,
        slots,
        positions,
        best_scores,
        best_tokens,
        maxima,
        groups,
        out,
        lists,
        logits.stride(0),
        start,
        start + num_tokens,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        SHARDED=is_sharded,
        APPROXIMATE=logits.is_cuda,
        num_warps=_ROW_WARPS if has_candidates else 1,
        maxnreg=_MAX_REGISTERS,
    )
    return out
