"""The Triton kernel that scores given tokens, against its plain-torch reference."""

from __future__ import annotations

import pytest
import torch
from test_token_scores import random_logits

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels.token_scores import shard_scores
from nvcli.kernels.triton.sampling.token_scores import token_scores

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1000])
def test_scores_are_those_of_the_reference(dtype: torch.dtype, start: int) -> None:
    """The vocabulary is no multiple of a block, rows lie apart, and some targets are in other shards."""
    padded = random_logits(5, 9001).to(dtype)
    padded[0, :4096] = -torch.inf  # a whole block
    padded[1, [7, 5000]] = 50.0
    targets = torch.tensor([5000, start + 7, start, start + 8999, start - 1])
    expected = shard_scores(padded[:, :9000].float(), targets, start=start, num_top=1)
    log_sum, target, top, top_ids = token_scores(padded.to(DEVICE)[:, :9000], targets.to(DEVICE), start)
    tolerance = TOLERANCE[torch.float32] * 10
    torch.testing.assert_close(log_sum.cpu(), expected.log_sum, atol=tolerance, rtol=tolerance)
    assert torch.equal(target.cpu(), expected.target)
    assert torch.equal(top.cpu(), expected.top[:, 0])
    assert torch.equal(top_ids.cpu(), expected.top_ids[:, 0])
    assert top_ids[1] == start + 7  # the first of equal ones


def test_a_nan_makes_the_sum_nan_and_nothing_but_minus_infinity_makes_it_minus_infinity() -> None:
    logits = random_logits(3, 300)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    log_sum, *_ = token_scores(logits.to(DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE), 0)
    assert torch.isfinite(log_sum[0])
    assert torch.isnan(log_sum[1])
    assert log_sum[2] == -torch.inf
