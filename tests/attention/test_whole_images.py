"""How images, or prompts, whose tokens attend to each other are laid out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvcli.attention.whole_images import WholeImage, plan_both_ways


@pytest.mark.parametrize(("num_tokens", "counts"), [(256, [5]), (1024, [4, 1]), (2048, [1] * 5)])
def test_long_ones_are_attended_a_few_at_a_time(num_tokens: int, counts: list[int]) -> None:
    """Their scores take memory that no plan counts."""
    batch: Any = SimpleNamespace(
        positions=torch.empty(0),
        slots=torch.arange(5),
        block_tables=torch.zeros(1, 5, num_tokens // 16, dtype=torch.int32),
        kv_cache=SimpleNamespace(spec=SimpleNamespace(block_size=16, dtype=torch.bfloat16)),
    )
    images = [WholeImage(number * num_tokens, num_tokens, number, 0) for number in range(5)]
    groups = plan_both_ways(images, [(None, 0)], batch)[None, 0]
    assert [len(group.mask) for group in groups] == counts
    assert [int(group.rows[0]) // num_tokens for group in groups] == [sum(counts[:n]) for n in range(len(counts))]
