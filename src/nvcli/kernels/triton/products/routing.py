"""The router of a mixture of experts in Triton: a program of one warp for each token, which holds all its scores.

An expert's rank in the choice is a 64-bit number, the score's bits above the expert's number turned round. So one
maximum finds an expert and its score, equal scores fall to the first expert, and no expert is found twice even where
scores are NaN: a token that is broken has distinct experts like any other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.expert_settings import TINY, Routing
from nvcli.kernels.expert_types import Routes
from nvcli.kernels.triton.elementwise.activation import softplus
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent

_TINY = tl.constexpr(TINY)


@triton.jit
def _ordered(x, exists):
    """Map float32 to int64 numbers below 2³¹ in the same order, with NaN below all of them and missing experts below
    NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    ordered = tl.where(x == x, ordered, -2147483647)
    return tl.where(exists, ordered, -2147483648)


@triton.jit
def _ranked(ordered, index):
    """Place an index below 2³¹ beneath an ordered number, so that the maximum is the first of equals."""
    return ordered * 4294967296 + (2147483647 - index)


@triton.jit(do_not_specialize=["part_stride"])
def _route_kernel(
    logits_ptr,  # [NUM_PARTS, T, NUM_EXPERTS + NUM_SHARED] float32, parts part_stride apart
    bias_ptr,  # None, or [NUM_EXPERTS] float32; and so the next two
    correction_ptr,
    factors_ptr,
    chosen_ptr,  # None, or [T, EXPERTS_PER_TOKEN] int32, the experts of each token
    routes,  # `Routes`, written
    shared_ptr,  # None, or [T, NUM_SHARED] float32, written
    part_stride,
    NUM_PARTS: tl.constexpr,
    ROUTING: tl.constexpr,  # `Routing`
    DEPENDENT: tl.constexpr,
):
    """Program (token)."""
    NUM_EXPERTS: tl.constexpr = ROUTING.num_experts
    NUM_SHARED: tl.constexpr = ROUTING.num_shared
    EXPERTS_PER_TOKEN: tl.constexpr = ROUTING.experts_per_token
    NUM_GROUPS: tl.constexpr = ROUTING.num_groups
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    GROUP_TILE: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    MEMBER_TILE: tl.constexpr = triton.next_power_of_2(GROUP_SIZE)
    GROUPS_PER_TOKEN: tl.constexpr = ROUTING.groups_per_token
    IS_MIXED: tl.constexpr = ROUTING.scoring == "sparsemixer"
    await_kernel_before(DEPENDENT)
    token = tl.program_id(0)
    group = tl.arange(0, GROUP_TILE)[:, None]
    member = tl.arange(0, MEMBER_TILE)[None, :]
    expert = group * GROUP_SIZE + member
    exists = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    logits = tl.zeros([GROUP_TILE, MEMBER_TILE], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        source = logits_ptr + part * part_stride + token.to(tl.int64) * (NUM_EXPERTS + NUM_SHARED) + expert
        logits += tl.load(source, mask=exists, other=0.0)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    if ROUTING.scoring == "sigmoid":
        scores = tl.sigmoid(logits)
        choice = scores
    elif ROUTING.scoring == "sqrtsoftplus":
        scores = tl.sqrt(softplus(logits))
        choice = scores
    elif IS_MIXED:
        scores = logits
        choice = logits
    else:
        largest = tl.max(tl.max(tl.where(exists, logits, float("-inf")), 1), 0)
        scores = tl.where(exists, tl.exp(logits - largest), 0.0)
        if correction_ptr is not None or not ROUTING.renormalise:
            scores = scores / tl.sum(tl.sum(scores, 1), 0)
        choice = logits
    if correction_ptr is not None:
        choice = scores + tl.load(correction_ptr + expert, mask=exists, other=0.0)
    may_be_chosen = exists
    if GROUPS_PER_TOKEN < NUM_GROUPS:
        valid = tl.where(exists & (choice == choice), choice, float("-inf"))
        group_scores = tl.max(valid, 1)
        if ROUTING.sums_two_best:
            place_of_first = tl.argmax(valid, 1)
            group_scores += tl.max(tl.where(member == place_of_first[:, None], float("-inf"), valid), 1)
        groups = tl.arange(0, GROUP_TILE)
        ranked_groups = _ranked(_ordered(group_scores, groups < NUM_GROUPS), groups)
        is_best = groups < 0
        for _ in tl.static_range(GROUPS_PER_TOKEN):
            best_group = tl.max(ranked_groups, 0)
            is_best = is_best | (ranked_groups == best_group)
            ranked_groups = tl.where(ranked_groups == best_group, -9223372036854775808, ranked_groups)
        may_be_chosen = exists & is_best[:, None]
    ranked = _ranked(_ordered(choice, may_be_chosen), expert)
    place = tl.full([GROUP_TILE, MEMBER_TILE], -1, tl.int32)
    for number in tl.static_range(EXPERTS_PER_TOKEN if chosen_ptr is None else 0):
        best = tl.max(tl.max(ranked, 1), 0)
        if IS_MIXED:
            own = tl.sum(tl.sum(tl.where(ranked == best, logits, 0.0), 1), 0)
            is_far = own - logits > ROUTING.tolerance * tl.maximum(tl.abs(logits), own)
            near = tl.where(is_far | (place >= 0) | (exists == 0), 0.0, tl.exp(logits - own))
            scores = tl.where(ranked == best, 1.0 / tl.sum(tl.sum(near, 1), 0), scores)
        place = tl.where(ranked == best, number, place)
        ranked = tl.where(ranked == best, -9223372036854775808, ranked)
    if chosen_ptr is not None:
        for number in tl.static_range(EXPERTS_PER_TOKEN):
            own_expert = tl.load(chosen_ptr + token.to(tl.int64) * EXPERTS_PER_TOKEN + number)
            place = tl.where(exists & (expert == own_expert), number, place)
    is_chosen = place >= 0
    if NUM_SHARED > 0:
        number_of_shared = tl.arange(0, triton.next_power_of_2(NUM_SHARED))
        is_shared = number_of_shared < NUM_SHARED
        shared = tl.zeros([triton.next_power_of_2(NUM_SHARED)], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            first_shared = part * part_stride + token.to(tl.int64) * (NUM_EXPERTS + NUM_SHARED) + NUM_EXPERTS
            shared += tl.load(logits_ptr + first_shared + number_of_shared, mask=is_shared, other=0.0)
        shared = tl.where(is_shared, tl.sigmoid(shared), 0.0)
        if ROUTING.renormalise:
            total = tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0) + tl.sum(shared, 0) + _TINY
            scores = scores / total
            shared = shared / total
        places = shared_ptr + token.to(tl.int64) * NUM_SHARED + number_of_shared
        tl.store(places, shared * ROUTING.scale, mask=is_shared)
    elif ROUTING.renormalise:
        scores = scores / (tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0) + _TINY)
    if factors_ptr is not None:
        scores *= tl.load(factors_ptr + expert, mask=exists, other=0.0)
    target = token.to(tl.int64) * EXPERTS_PER_TOKEN + place
    tl.store(routes.experts + target, expert, mask=is_chosen)
    tl.store(routes.weights + target, scores * ROUTING.scale, mask=is_chosen)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routes:
    """See `nvcli.kernels.routing.route`. logits: its last two dimensions are dense; chosen: contiguous."""
    num_parts, num_tokens, num_experts = logits.shape
    assert num_experts == routing.num_experts + routing.num_shared
    assert routing.num_shared == 0 or routing.scoring == "sigmoid", "no family weighs shared experts otherwise"
    assert logits.stride()[1:] == (num_experts, 1)
    size = (num_tokens, routing.experts_per_token)
    assert chosen is None or (chosen.shape == size and chosen.is_contiguous())
    assert chosen is None or routing.scoring != "sparsemixer", "it weighs experts as it chooses them"
    routes = Routes(*(torch.empty(size, dtype=dtype, device=logits.device) for dtype in (torch.int32, torch.float32)))
    shared: Tensor | None = None
    if routing.num_shared:
        shared = torch.empty(num_tokens, routing.num_shared, dtype=torch.float32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        bias,
        correction,
        factors,
        chosen,
        routes,
        shared,
        logits.stride(0),
        NUM_PARTS=num_parts,
        ROUTING=routing,
        num_warps=1,
        **dependent(logits.device),
    )
    return routes._replace(shared=shared)
