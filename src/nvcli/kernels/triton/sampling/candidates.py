"""A small top-k by the maxima of groups: the few tokens that it can keep are found without a search over the row.

The pass over the logits leaves the maximum of each group of GROUP_TOKENS tokens (`sampling.py`). The k-th largest of
these maxima is a *level*: k tokens at least are at the level or above it, so that whatever top-k keeps is at it or
above it, in the groups whose maximum is. Those are about k groups, small enough for the registers of one program, which
finds the k-th largest logit, the thresholds of top-p and min-p, and the best token with its noise: nothing else of the
vocabulary needs noise. Where more groups are *at* the level than there is room for, because many logits are equal, the
program looks at them in one more pass over the row, and keeps their number and the best of them.

A *shard* of a row is a pointer to its logits and its first and last token; *listed* are a pointer to the numbers of
groups, and how many these are. `nvcli.kernels.candidates` says what the lists of several ranks hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.core.messages import NOT_FINITE
from nvcli.kernels.sampling_columns import INFINITE_SCORE, LIST_WIDTH, MAX_CANDIDATES, SamplingColumns
from nvcli.kernels.triton.sampling.philox import draw_of, gumbel, quad_uniforms, uniforms_at
from nvcli.kernels.triton.sampling.top_k_top_p import min_kept, smallest_value

GROUP_TOKENS = tl.constexpr(64)
"""Tokens of a group."""
LISTED_GROUPS = tl.constexpr(128)
"""The most groups whose tokens a row's program holds: MAX_CANDIDATES, and as many again for equal logits."""
_MAX_CANDIDATES = tl.constexpr(MAX_CANDIDATES)
_LIST_WIDTH = tl.constexpr(LIST_WIDTH)
_GROUP_QUADS = tl.constexpr(GROUP_TOKENS.value // 4)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
NO_CHOICE = tl.constexpr(NOT_FINITE)
_INFINITE_PACKED = tl.constexpr(INFINITE_SCORE << 32)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SCAN_QUADS = tl.constexpr(1024)
"""Quads (groups of four tokens) of a whole row that a program looks at in one go."""
_DRAWN_QUADS = tl.constexpr(256)
"""Quads of the listed groups that a program looks at in one go."""


@triton.jit
def has_small_top_k(temperature, top_k):
    """Say whether a row's token is drawn from candidates. Both arguments are scalars."""
    return (temperature > 0) & (top_k > 0) & (top_k <= _MAX_CANDIDATES)


@triton.jit
def better(score, token, other_score, other_token):
    """Choose the better of two (score, token): the larger score, and of equal scores the smaller token."""
    wins = (other_score > score) | ((other_score == score) & (other_token < token))
    return tl.where(wins, other_score, score), tl.where(wins, other_token, token)


@triton.jit
def _best(scores, tokens, is_allowed):
    """Find the best (score, token) of the allowed ones, three tensors of one shape; (-inf, NO_TOKEN) where none is."""
    scores = tl.where(is_allowed, scores, -float("inf"))
    best = tl.max(scores)
    return best, tl.min(tl.where(is_allowed & (scores == best), tokens, NO_TOKEN))


@triton.jit
def _load_quads(shard, quads, exists):
    """Load the quads [Q] that exist [Q] of a shard: → logits [Q, 4] float32, tokens int32.

    Where a token is not there, or its logit is NaN, the logit is -inf.
    """
    row_ptr, start, end = shard
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = exists[:, None] & (tokens >= start) & (tokens < end)
    values = tl.load(row_ptr + (tokens - start), mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(values > -float("inf"), values, -float("inf")), tokens


@triton.jit
def _ties_of_row(shard, level, temperature, draw, APPROXIMATE: tl.constexpr):
    """Count the tokens whose logit equals `level`, and find the best of them: → (count float32, score, token),
    scalars."""
    _, start, end = shard
    count = tl.full([], 0.0, tl.float32)
    best = tl.full([], -float("inf"), tl.float32)
    best_token = tl.full([], NO_TOKEN, tl.int32)
    for first in range(start // 4, tl.cdiv(end, 4), _SCAN_QUADS):
        quads = first + tl.arange(0, _SCAN_QUADS)
        values, tokens = _load_quads(shard, quads, quads >= 0)
        is_tie = values == level
        found = tl.sum(is_tie.to(tl.float32))
        if found > 0:
            noise = gumbel(quad_uniforms(quads, draw), APPROXIMATE)
            score, token = _best(values * (1.0 / temperature) + noise, tokens, is_tie)
            best, best_token = better(best, best_token, score, token)
        count += found
    return count, best, best_token


@triton.jit
def _listed_quads(listed, lanes, start):
    """Find each lane's quad of the listed groups, and whether it has one: lanes [Q] → [Q] int32, [Q] bool."""
    groups_ptr, num_listed = listed
    place = lanes // _GROUP_QUADS
    is_listed = place < num_listed
    groups = tl.load(groups_ptr + place, mask=is_listed, other=0)
    return start // 4 + groups * _GROUP_QUADS + lanes % _GROUP_QUADS, is_listed


@triton.jit
def best_listed(shard, listed, least, temperature, draw, TIES_ONLY: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Find the best (score, token) in the listed groups, among tokens whose logit / temperature is at least `least`, or
    with TIES_ONLY among those whose logit equals `least`. The noise is made here, for few tokens at a time."""
    best = tl.full([], -float("inf"), tl.float32)
    best_token = tl.full([], NO_TOKEN, tl.int32)
    for first in range(0, listed[1] * _GROUP_QUADS, _DRAWN_QUADS):
        quads, is_listed = _listed_quads(listed, first + tl.arange(0, _DRAWN_QUADS), shard[1])
        values, tokens = _load_quads(shard, quads, is_listed)
        # The same division, rounded the same way, as that which made the threshold.
        is_kept = values == least if TIES_ONLY else tl.div_rn(values, temperature) >= least
        noise = gumbel(quad_uniforms(quads, draw), APPROXIMATE)
        is_kept &= values > -float("inf")
        score, token = _best(values * (1.0 / temperature) + noise, tokens, is_kept)
        best, best_token = better(best, best_token, score, token)
    return best, best_token


@triton.jit
def list_groups(
    maxima_ptr,  # [number of groups] of the logits' type
    groups_ptr,  # [LISTED_GROUPS] int32, written
    top_k,
    start,
    end,
    MAX_GROUPS: tl.constexpr,
):
    """Write the numbers of the groups that hold what a small top-k may keep to the scratch memory `groups_ptr`.

    maxima_ptr: the maxima of the groups of the tokens `start` to `end`, counted from the quad of `start`. → (how many
    groups are listed, the level, the row's largest logit, whether all groups whose maximum equals the level are
    listed). Where not all are, none is.
    """
    dtype: tl.constexpr = maxima_ptr.dtype.element_ty
    num_groups = tl.cdiv(tl.cdiv(end, 4) - start // 4, _GROUP_QUADS)
    group = tl.arange(0, MAX_GROUPS)
    exists = group < num_groups
    maxima = tl.load(maxima_ptr + group, mask=exists, other=-float("inf")).to(tl.float32)
    top = tl.max(maxima, axis=0)
    least = tl.min(tl.where(exists, maxima, float("inf")), axis=0)
    least = tl.where(num_groups < top_k, -float("inf"), least)
    ones = tl.full([MAX_GROUPS], 1.0, tl.float32)
    level = smallest_value(maxima, ones, least, top, top_k.to(tl.float32), dtype)
    # Fewer than k groups are above the level, and always fit.
    above = maxima > level
    at_level = (maxima == level) & (maxima > -float("inf"))
    all_fit = tl.sum((above | at_level).to(tl.int32), axis=0) <= LISTED_GROUPS
    is_listed = above | tl.where(all_fit, at_level, False)
    places = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + places, group, mask=is_listed)
    tl.debug_barrier()  # other threads read them
    return tl.sum(is_listed.to(tl.int32), axis=0), level, top, all_fit


@triton.jit
def top_k_candidates(
    shard,
    listed,
    found,  # the other results of `list_groups`
    temperature,
    top_k,
    draw,
    APPROXIMATE: tl.constexpr,
):
    """Find the tokens that a small top-k may keep, from what `list_groups` gives.

    → values [Q, 4] of the listed groups, kth: the k-th largest logit of the row (-inf where it has fewer),
    and (count, score, token) of the tokens that equal `kth` where those are not among the values; count 0 otherwise.
    """
    level, top, all_fit = found
    dtype: tl.constexpr = shard[0].dtype.element_ty
    NUM_QUADS: tl.constexpr = LISTED_GROUPS * _GROUP_QUADS
    quads, is_listed = _listed_quads(listed, tl.arange(0, NUM_QUADS), shard[1])
    values, _ = _load_quads(shard, quads, is_listed)
    values = tl.where(all_fit, values, tl.where(values > level, values, -float("inf")))
    kth = smallest_value(values, tl.full([NUM_QUADS, 4], 1.0, tl.float32), level, top, top_k.to(tl.float32), dtype)
    tie_count = tl.full([], 0.0, tl.float32)
    tie_score = tl.full([], -float("inf"), tl.float32)
    tie_token = tl.full([], NO_TOKEN, tl.int32)
    if (all_fit == 0) & (kth == level):
        tie_count, tie_score, tie_token = _ties_of_row(shard, level, temperature, draw, APPROXIMATE)
    return values, kth, tie_count, tie_score, tie_token


@triton.jit
def min_kept_of_candidates(values, kth, top, tie_count, temperature, top_p, min_p, dtype: tl.constexpr):
    """Find the smallest logit / temperature that is kept, from what `top_k_candidates` gives: values [Q, 4], the others
    scalars."""
    scale = _LOG2_E / temperature
    weights = tl.where(values >= kth, tl.exp2((values - top) * scale), 0.0)
    mass = tl.sum(weights)
    if tie_count > 0:
        mass += tie_count * tl.exp2((kth - top) * scale)
    return min_kept(values, weights, mass, kth, top, temperature, top_p, min_p, dtype)


@triton.jit
def store_list(list_ptr, shard, listed, kth, tie_count, tie_token):
    """Write a rank's list for one row to `list_ptr` [LIST_WIDTH] int32, from what `list_groups` and `top_k_candidates`
    give.

    tie_count: how many tokens of the row equal `kth`, or 0: those of the listed groups are all there are; tie_token:
    the best of all that equal it.
    """
    num_above = tl.full([], 0, tl.int32)
    num_listed_ties = tl.full([], 0.0, tl.float32)
    for first in range(0, listed[1] * _GROUP_QUADS, _DRAWN_QUADS):
        quads, is_listed = _listed_quads(listed, first + tl.arange(0, _DRAWN_QUADS), shard[1])
        values, tokens = _load_quads(shard, quads, is_listed)
        is_above = (values > kth).to(tl.int32)
        places = num_above + tl.cumsum(tl.reshape(is_above, (_DRAWN_QUADS * 4,)), axis=0) - 1
        places = tl.reshape(places, (_DRAWN_QUADS, 4))
        tl.store(list_ptr + places, values.to(tl.int32, bitcast=True), mask=values > kth)
        tl.store(list_ptr + _MAX_CANDIDATES + places, tokens, mask=values > kth)
        num_above += tl.sum(is_above)
        num_listed_ties += tl.sum(((values == kth) & (values > -float("inf"))).to(tl.float32))
    entries = tl.arange(0, _MAX_CANDIDATES)
    empty = tl.full([_MAX_CANDIDATES], -float("inf"), tl.float32)
    is_empty = (entries >= num_above) & (entries < _MAX_CANDIDATES - 1)
    tl.store(list_ptr + entries, empty.to(tl.int32, bitcast=True), mask=is_empty)
    tl.store(list_ptr + _MAX_CANDIDATES + entries, 0, mask=is_empty)
    tl.store(list_ptr + _MAX_CANDIDATES - 1, kth.to(tl.int32, bitcast=True))
    tl.store(list_ptr + 2 * _MAX_CANDIDATES - 1, tl.where(tie_token == NO_TOKEN, 0, tie_token))
    tie_count = tl.where(tie_count > 0, tie_count, num_listed_ties)
    tl.store(list_ptr + 2 * _MAX_CANDIDATES, tie_count.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _choose_candidates_kernel(
    packed_ptr,  # [N] int64
    lists_ptr,  # [NUM_RANKS, N, LIST_WIDTH] int32
    columns,  # `SamplingColumns`
    slots_ptr,  # [N] int64
    positions_ptr,  # [N]
    out_ptr,  # [N] int32, written
    num_rows,
    NUM_RANKS: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Program (row)."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + index)
    temperature = tl.load(columns.temperature + slot)
    top_k = tl.load(columns.top_k + slot)
    packed = tl.load(packed_ptr + index)
    if has_small_top_k(temperature, top_k) & (packed < _INFINITE_PACKED):
        entries = tl.arange(0, triton.next_power_of_2(NUM_RANKS) * _MAX_CANDIDATES)
        rank, place = entries // _MAX_CANDIDATES, entries % _MAX_CANDIDATES
        exists, is_last = rank < NUM_RANKS, place == _MAX_CANDIDATES - 1
        lists = lists_ptr + (rank.to(tl.int64) * num_rows + index) * _LIST_WIDTH
        values = tl.load(lists + place, mask=exists, other=0).to(tl.float32, bitcast=True)
        values = tl.where(exists, values, -float("inf"))
        tokens = tl.load(lists + _MAX_CANDIDATES + place, mask=exists, other=0)
        counts = tl.load(lists + 2 * _MAX_CANDIDATES, mask=exists & is_last, other=1).to(tl.float32)
        top = tl.max(values, axis=0)
        # No rank's k-th largest is above that of all.
        least = tl.max(tl.where(is_last, values, -float("inf")), axis=0)
        kth = smallest_value(values, counts, least, top, top_k.to(tl.float32), tl.float32)
        weights = counts * tl.exp2((values - top) * (_LOG2_E / temperature))
        weights = tl.where((values >= kth) & (values > -float("inf")), weights, 0.0)
        least = min_kept(
            values,
            weights,
            tl.sum(weights, axis=0),
            kth,
            top,
            temperature,
            tl.load(columns.top_p + slot),
            tl.load(columns.min_p + slot),
            tl.float32,
        )
        uniforms = uniforms_at(tokens, draw_of(columns, slot, tl.load(positions_ptr + index)))
        scores = values * (1.0 / temperature) + gumbel(uniforms, APPROXIMATE)
        is_kept = (values > -float("inf")) & (tl.div_rn(values, temperature) >= least)
        _, token = _best(scores, tokens, is_kept)
        tl.store(out_ptr + index, tl.where(token == NO_TOKEN, NO_CHOICE, token))
    else:
        tl.store(out_ptr + index, packed.to(tl.int32) ^ NO_TOKEN)


def choose_candidates(
    packed: Tensor, lists: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor
) -> Tensor:
    """See `nvcli.kernels.candidates.choose_candidates`."""
    num_ranks, num_rows, _ = lists.shape
    assert lists.is_contiguous()
    ids = torch.empty(num_rows, dtype=torch.int32, device=lists.device)
    _choose_candidates_kernel[(num_rows,)](
        packed,
        lists,
        columns,
        slots,
        positions,
        ids,
        num_rows,
        NUM_RANKS=num_ranks,
        APPROXIMATE=lists.is_cuda,
    )
    return ids
