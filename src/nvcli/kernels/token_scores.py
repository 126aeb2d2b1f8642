"""Scores given tokens by a shard of their logits: what their log-probabilities and the likeliest tokens follow from.

Plain torch is the reference. CUDA tensors take the Triton kernel that is held to it, where one likeliest token is
wanted.

Shapes: N rows of logits, M tokens of the shard, K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT_ROWS = 32
"""Rows that are turned into float32 at a time, which takes 8 bytes for each of their logits."""


@dataclass(frozen=True, slots=True)
class ShardScores:
    """What one shard of the vocabulary says of N rows. Logits are float32, ids are those of the whole vocabulary."""

    log_sum: Tensor
    """[N], the logarithm of the sum of the exponentials of the shard's logits."""
    target: Tensor
    """[N], the logit of each row's target; -inf where the target is in another shard."""
    top: Tensor
    """[N, K], the largest logits, the largest first; -inf where the shard has fewer tokens."""
    top_ids: Tensor
    """[N, K] int32, their tokens."""


def shard_scores(logits: Tensor, targets: Tensor, *, start: int, num_top: int) -> ShardScores:
    """Score the tokens `targets` [N] int64 by logits [N, M] of the tokens `start` to `start + M`; M may be 0.

    `num_top` is K, at least 1. A NaN among a row's logits makes its `log_sum` NaN.
    """
    num_rows, num_tokens = logits.shape
    log_sum, target = (torch.full((num_rows,), -torch.inf, device=logits.device) for _ in range(2))
    top = torch.full((num_rows, num_top), -torch.inf, device=logits.device)
    top_ids = torch.zeros(num_rows, num_top, dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return ShardScores(log_sum, target, top, top_ids)
    if logits.is_cuda and num_top == 1:
        from nvcli.kernels.triton.token_scores import token_scores

        log_sum, target, best, best_ids = token_scores(logits, targets, start)
        return ShardScores(log_sum, target, best[:, None], best_ids[:, None])
    places = targets - start
    is_here = (places >= 0) & (places < num_tokens)
    found = logits.gather(1, places.clamp(0, num_tokens - 1)[:, None])[:, 0].float()
    target = torch.where(is_here, found, target)
    num_found = min(num_top, num_tokens)
    for first in range(0, num_rows, _FLOAT_ROWS):
        rows = slice(first, first + _FLOAT_ROWS)
        part = logits[rows].float()
        log_sum[rows] = part.logsumexp(dim=1)
        if num_top == 1:
            values, ids = part.max(dim=1, keepdim=True)
        else:
            values, ids = part.topk(num_found, dim=1)
        top[rows, :num_found] = values
        top_ids[rows, :num_found] = (ids + start).int()
    return ShardScores(log_sum, target, top, top_ids)


def merge_scores(shards: ShardScores) -> tuple[Tensor, Tensor, Tensor]:
    """Join the scores of all shards, whose tensors have one more dimension in front, [size, …].

    Returns the log-probabilities of the targets [N], the ids of the likeliest tokens [N, K] int32, and their
    log-probabilities [N, K].
    """
    log_sum = shards.log_sum.logsumexp(dim=0)
    size, num_rows, num_top = shards.top.shape
    top = shards.top.transpose(0, 1).reshape(num_rows, size * num_top)
    top_ids = shards.top_ids.transpose(0, 1).reshape(num_rows, size * num_top)
    if size > 1:
        top, places = top.topk(num_top, dim=1)
        top_ids = top_ids.gather(1, places)
    return shards.target.amax(dim=0) - log_sum, top_ids, top - log_sum[:, None]
