"""Compares two models' logits at the same positions, each rank with its shard of the vocabulary.

All figures are computed and summed in float64. The ranks exchange a few numbers per position, never logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.tools.quality.statistics import TokenSums
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def compare_logits(
    group: TensorParallelGroup, a: Tensor, b: Tensor, targets: Tensor, *, vocab_size: int
) -> TokenSums | None:
    """Compare logits [N, M] of A and B, for this rank's part of the vocabulary: M tokens from rank × M on.

    targets: [n] int64, the tokens that follow the first n positions, n ≤ N. The call is collective. → the sums over
    the positions, on every rank; None if a logit is NaN.
    """
    first = group.rank * a.shape[1]
    is_token = torch.arange(first, first + a.shape[1], device=a.device) < vocab_size
    shards = [logits.double().masked_fill_(~is_token, -torch.inf) for logits in (a, b)]
    columns = []
    for logits in shards:
        best, place = logits.max(-1)
        columns += [logits.logsumexp(-1), best, (place + first).double(), _of_targets(logits, targets, first)]
    everyone = group.all_gather(torch.stack(columns, dim=-1))  # [ranks, N, 8]
    log_sums, best_tokens, target_logits = [], [], []
    for model in range(2):
        log_sum, best, token, target = everyone[..., 4 * model : 4 * model + 4].unbind(-1)
        log_sums.append(log_sum.logsumexp(0))
        best_tokens.append(token.gather(0, best.argmax(0)[None])[0])
        target_logits.append(target.amax(0))
    log_p, log_q = (logits - log_sum[:, None] for logits, log_sum in zip(shards, log_sums, strict=True))
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    divergences = group.all_gather(terms.sum(-1)).sum(0).clamp_min(0.0)  # rounding may go below 0; NaN stays
    if bool(divergences.isnan().any()):
        return None
    num_targets = len(targets)
    nll_a, nll_b = (
        float((log_sum - target)[:num_targets].sum()) for log_sum, target in zip(log_sums, target_logits, strict=True)
    )
    return TokenSums(
        positions=len(a),
        kl_sum=float(divergences.sum()),
        kl_max=float(divergences.max()),
        same_best=int((best_tokens[0] == best_tokens[1]).sum()),
        targets=num_targets,
        nll_a=nll_a,
        nll_b=nll_b,
    )


def _of_targets(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return the logit of each position's target, or -inf if another rank has it or there is no target. → [N]"""
    found = torch.full((len(logits),), -torch.inf, dtype=logits.dtype, device=logits.device)
    own = targets - first
    is_own = (own >= 0) & (own < logits.shape[1])
    picked = logits[: len(targets)].gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    found[: len(targets)] = torch.where(is_own, picked, -torch.inf)
    return found
