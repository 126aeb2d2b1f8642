"""Attention with explicit scores in plain torch, for soft caps and sinks, which `scaled_dot_product_attention` lacks.

A head's sink is one extra score in each of its softmaxes that belongs to no key: the weights of the keys add up to less
than 1 (StreamingLLM, https://arxiv.org/abs/2309.17453; learned in gpt-oss, https://arxiv.org/abs/2508.10925).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.spec import AttentionSpec

_CAUSAL_QUERIES = 256
"""Queries of a prompt attended at once; bounds the memory of the scores."""


def is_needed(spec: AttentionSpec) -> bool:
    """Whether a kind of attention needs explicit scores."""
    return spec.soft_cap is not None or spec.has_sinks


def attend(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, sinks: Tensor | None
) -> Tensor:
    """Compute softmax(q kᵀ scale, capped) v over the last two dimensions: [..., n, D] and twice [..., m, D] →
    [..., n, D].

    `mask` is added to the scores. `is_causal`: n equals m, and query i sees the keys up to i. sinks: broadcast against
    [..., n, 1], float32.
    """
    if not is_causal:
        return _attend(spec, q, k, v, sinks=sinks, mask=mask)
    parts = []
    for start in range(0, q.shape[-2], _CAUSAL_QUERIES):
        queries = q[..., start : start + _CAUSAL_QUERIES, :]
        num_seen = start + queries.shape[-2]
        hidden = torch.full((queries.shape[-2], num_seen), float("-inf"), device=q.device).triu_(start + 1)
        parts.append(_attend(spec, queries, k[..., :num_seen, :], v[..., :num_seen, :], sinks=sinks, mask=hidden))
    return torch.cat(parts, dim=-2)


def attend_part(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend to a part of the keys: → [..., n, D] and the log of the sum of weights [..., n], both float32.

    The shapes are those of `attend`. A query that sees none of the keys gets zeros, and -inf.
    """
    scores = _scores(spec, q, k, mask)
    every = scores if sinks is None else torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    log_sum = every.logsumexp(-1)
    weights = (scores - log_sum.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1)).exp_()
    return torch.matmul(weights, v.float()), log_sum


def join_parts(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the results of `attend_part` for two parts of the keys. Each query sees a key of at least one of them."""
    log_sum = torch.logaddexp(first[1], second[1])
    out = sum(part * (own - log_sum).exp_().unsqueeze(-1) for part, own in (first, second))
    assert isinstance(out, Tensor)
    return out, log_sum


def _attend(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, mask: Tensor | None
) -> Tensor:
    scores = _scores(spec, q, k, mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)


def _scores(spec: AttentionSpec, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.matmul(q.float() * spec.scale, k.float().transpose(-1, -2))
    if spec.soft_cap is not None:
        scores = scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if mask is not None:
        scores.add_(mask)
    return scores
