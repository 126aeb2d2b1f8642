"""Scores given tokens by a shard of their logits: what their log-probabilities and the likeliest tokens follow from.

Plain torch is the reference. CUDA tensors take the Triton kernel that is held to it, where one likeliest token is
wanted.

Shapes: N rows of logits, M tokens of the shard, K likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from nvcli.kernels.sampling import pack, unpack_argmax

_FLOAT_ROWS = 32
"""Rows that are turned into float32 at a time, which takes 8 bytes for each of their logits."""


@dataclass(frozen=True, slots=True)
class ShardScores:
    """The scores of N rows by one shard of the vocabulary. Logits are float32, ids are those of the whole
    vocabulary."""

    log_sum: Tensor
    """[N], the logarithm of the sum of the exponentials of the shard's logits."""
    target: Tensor
    """[N], the logit of each row's target; -inf where the target is in another shard."""
    top: Tensor
    """[N, K], the largest logits, the largest first; -inf where the shard has fewer tokens."""
    top_ids: Tensor
    """[N, K] int32, their tokens."""


def shard_scores(
    logits: Tensor, targets: Tensor, *, start: int, num_top: int, batch_invariant: bool = False
) -> ShardScores:
    """Score the tokens `targets` [N] int64 by logits [N, M] of the tokens `start` to `start + M`; M may be 0.

    `num_top` is K, at least 1. A NaN among a row's logits makes its `log_sum` NaN. `batch_invariant`: a row's scores
    have the same bits whatever other rows there are, and of equal logits the first token comes first.
    """
    num_rows, num_tokens = logits.shape
    log_sum, target = (torch.full((num_rows,), -torch.inf, device=logits.device) for _ in range(2))
    top = torch.full((num_rows, num_top), -torch.inf, device=logits.device)
    top_ids = torch.zeros(num_rows, num_top, dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return ShardScores(log_sum, target, top, top_ids)
    if logits.is_cuda and (num_top == 1 or batch_invariant):
        from nvcli.kernels.triton.sampling.token_scores import token_scores

        log_sum, target, best, best_ids = token_scores(logits, targets, start)
        if num_top == 1:
            return ShardScores(log_sum, target, best[:, None], best_ids[:, None])
        for first in range(0, num_rows, _FLOAT_ROWS):
            rows = slice(first, first + _FLOAT_ROWS)
            _store_top(logits[rows].float(), top[rows], top_ids[rows], start)
        return ShardScores(log_sum, target, top, top_ids)
    places = targets - start
    is_here = (places >= 0) & (places < num_tokens)
    found = logits.gather(1, places.clamp(0, num_tokens - 1)[:, None])[:, 0].float()
    target = torch.where(is_here, found, target)
    num_found = min(num_top, num_tokens)
    for first in range(0, num_rows, _FLOAT_ROWS):
        rows = slice(first, first + _FLOAT_ROWS)
        part = logits[rows].float()
        if batch_invariant:
            log_sum[rows] = torch.stack([row.logsumexp(dim=0) for row in part])
            _store_top(part, top[rows], top_ids[rows], start)
            continue
        log_sum[rows] = part.logsumexp(dim=1)
        if num_top == 1:
            values, ids = part.max(dim=1, keepdim=True)
        else:
            values, ids = part.topk(num_found, dim=1)
        top[rows, :num_found] = values
        top_ids[rows, :num_found] = (ids + start).int()
    return ShardScores(log_sum, target, top, top_ids)


def _store_top(logits: Tensor, top: Tensor, top_ids: Tensor, start: int) -> None:
    """Find the largest logits [n, M] of each row and their tokens, of equal ones the first token first, and store them
    in `top` and `top_ids` [n, K]."""
    num_found = min(top.shape[1], logits.shape[1])
    tokens = torch.arange(start, start + logits.shape[1], device=logits.device)
    packed = pack(logits, tokens.expand_as(logits)).topk(num_found, dim=1).values
    ids = unpack_argmax(packed.flatten()).view(packed.shape)
    top[:, :num_found] = logits.gather(1, ids.long() - start)
    top_ids[:, :num_found] = ids


def merge_scores(shards: ShardScores) -> tuple[Tensor, Tensor, Tensor]:
    """Join the scores of all shards, whose tensors have one more dimension in front, [size, …].

    Returns the log-probabilities of the targets [N], the ids of the likeliest tokens [N, K] int32, and their
    log-probabilities [N, K].
    """
    log_sum = reduce(torch.logaddexp, shards.log_sum)  # in the order of shards, however many rows there are
    size, num_rows, num_top = shards.top.shape
    top = shards.top.transpose(0, 1).reshape(num_rows, size * num_top)
    top_ids = shards.top_ids.transpose(0, 1).reshape(num_rows, size * num_top)
    if size > 1:
        places = top.argsort(dim=1, descending=True, stable=True)[:, :num_top]
        top, top_ids = top.gather(1, places), top_ids.gather(1, places)
    return shards.target.amax(dim=0) - log_sum, top_ids, top - log_sum[:, None]
