"""The router of a mixture of experts: which experts each token goes to, and how much each of their results counts.
Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.

Shapes: T tokens, E experts, k experts per token. Everything here is computed in float32: two experts may be so close
that a half type cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.expert_settings import TINY, Routing
from nvcli.kernels.expert_types import Routes
from nvcli.kernels.invariant_linear import invariant_linear


def router_logits(x: Tensor, weight: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """x Wᵀ in float32, in parts that add up to it. x: [T, H]; weight: [E, H], of the type of x or in float32 →
    [P, T, E] float32.

    `batch_invariant`: a token's logits have the same bits whatever other tokens there are.
    """
    if weight.dtype == torch.float32:
        x = x.float()
    if batch_invariant:
        return invariant_linear(x, weight, dtype=torch.float32).unsqueeze(0)
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x.float(), weight.float()).unsqueeze(0)
    from nvcli.kernels.triton.products import linear

    if linear.takes_parts(x, weight):
        return linear.linear_parts(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32).unsqueeze(0)


@with_kernel("products.routing")
def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routes:
    """Choose each token's experts. logits: [P, T, E and the shared ones] float32, parts that add up; bias, correction,
    factors: [E] float32; chosen: [T, k] int32.

    `bias` belongs to the logits. `correction` is added to the scores for the choice, and does not change the weights
    of the experts that are chosen (DeepSeek-V3, 2024). `factors` multiply these weights and do not change the choice.
    Of experts with equal scores the first is chosen, and a NaN is chosen last; its weight is NaN. `chosen` are a
    token's experts, whatever their scores, no expert twice: these weigh them.
    """
    total, of_shared = torch.split(logits.sum(dim=0), [routing.num_experts, routing.num_shared], dim=-1)
    if bias is not None:
        total = total + bias
    if routing.scoring == "sigmoid":
        choice = scores = total.sigmoid()
    elif routing.scoring == "sqrtsoftplus":
        choice = scores = F.softplus(total).sqrt()
    else:
        choice, scores = total, total.softmax(dim=-1)  # which keeps the order, but may make small logits equal
    if correction is not None:
        choice = scores + correction
    choice = choice.masked_fill(choice.isnan(), -torch.inf)
    if routing.groups_per_token < routing.num_groups:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    if chosen is None:
        experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : routing.experts_per_token]
    else:
        experts = chosen.long()
    is_mixed = routing.scoring == "sparsemixer"
    weights = _mix_sparsely(total, experts, routing.tolerance) if is_mixed else scores.gather(1, experts)
    if routing.num_shared:
        assert routing.scoring == "sigmoid", "no family weighs them otherwise"
        weights = torch.cat((weights, of_shared.sigmoid()), dim=-1)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    weights = weights * routing.scale
    if routing.num_shared:
        weights, shared = torch.split(weights, [experts.shape[1], routing.num_shared], dim=-1)
        return Routes(experts.int(), weights.contiguous(), shared.contiguous())
    return Routes(experts.int(), weights if factors is None else weights * factors[experts])


def _mix_sparsely(logits: Tensor, experts: Tensor, tolerance: float) -> Tensor:
    """Weigh the chosen experts one after another as `Routing.scoring` says: [T, E], [T, k] → [T, k]."""
    weights, left = [], logits
    for expert in torch.split(experts, 1, dim=1):
        best = logits.gather(1, expert)
        is_far = best - logits > tolerance * torch.maximum(logits.abs(), best)
        weights.append(1.0 / (left - best).exp().masked_fill(is_far, 0.0).sum(dim=-1, keepdim=True))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, dim=1)


def choose_experts(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routes:
    """Do what `route` does with the same arguments, also where the correction belongs to the logits
    (`Routing.corrects_logits`): then the experts of the largest corrected logits are chosen, and weighed by the sigmoid
    of their plain ones. Few families need that, so it has no kernel of its own."""
    if not routing.corrects_logits:
        return route(logits, routing, bias=bias, correction=correction, factors=factors, chosen=chosen)
    assert bias is None, "no family has one"
    assert factors is None, "no family has them"
    assert chosen is None, "no family has them"
    by_logits = replace(routing, scoring="softmax", renormalise=True)
    experts = route(logits, by_logits, bias=correction).experts
    weights = logits.sum(dim=0).gather(1, experts.long()).sigmoid()
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return Routes(experts, weights * routing.scale)


def route_row_by_row(
    logits: Tensor, routing: Routing, *, chosen: Tensor | None = None, **terms: Tensor | None
) -> Routes:
    """Do what `choose_experts` does with the same arguments, on a CPU for each token alone (see `row_by_row`)."""
    assert routing.num_shared == 0, "no such model is batch-invariant"
    if logits.is_cuda or logits.shape[1] < 2:
        return choose_experts(logits, routing, chosen=chosen, **terms)
    rows = torch.split(logits, 1, dim=1)
    experts = [None] * len(rows) if chosen is None else torch.split(chosen, 1)
    routes = [choose_experts(row, routing, chosen=own, **terms) for row, own in zip(rows, experts, strict=True)]
    return Routes(*(torch.cat(columns) for columns in zip(*(route[:2] for route in routes), strict=True)))


def _in_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Mark the experts that may be chosen: [T, E] → [T, E] bool."""
    members = choice.view(len(choice), routing.num_groups, -1)
    sums = members.topk(2 if routing.sums_two_best else 1, dim=-1).values.sum(dim=-1)
    best = sums.argsort(dim=-1, descending=True, stable=True)[:, : routing.groups_per_token]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, value=True)
    return is_best.unsqueeze(-1).expand_as(members).flatten(1)
