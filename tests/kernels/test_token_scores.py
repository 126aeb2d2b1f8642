"""Scores of given tokens: shards say together what the whole vocabulary says, and the Triton kernel what torch says."""

from __future__ import annotations

import pytest
import torch

from nvcli.kernels.token_scores import ShardScores, merge_scores, shard_scores

VOCAB = 97


def random_logits(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_top", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_joined_to_the_whole(num_top: int, size: int) -> None:
    """With four shards of 33 tokens the last one has none."""
    logits = random_logits(70)
    targets = torch.arange(70)
    width = -(-VOCAB // size) if size < 4 else 33
    starts = [min(rank * width, VOCAB) for rank in range(size)]
    parts = [
        shard_scores(logits[:, start : min(start + width, VOCAB)], targets, start=start, num_top=num_top)
        for start in starts
    ]
    fields = ("log_sum", "target", "top", "top_ids")
    joined = ShardScores(*(torch.stack([getattr(part, name) for part in parts]) for name in fields))
    logprobs, top_ids, top_logprobs = merge_scores(joined)
    expected = logits.log_softmax(dim=-1)
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    best = expected.topk(num_top, dim=-1)
    assert torch.equal(top_ids.long(), best.indices)
    torch.testing.assert_close(top_logprobs, best.values)


def test_what_is_not_finite_makes_no_log_probability() -> None:
    logits = random_logits(3)
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    one = shard_scores(logits, torch.zeros(3, dtype=torch.int64), start=0, num_top=1)
    whole = ShardScores(one.log_sum[None], one.target[None], one.top[None], one.top_ids[None])
    assert torch.isfinite(merge_scores(whole)[0]).tolist() == [True, False, False]
