"""Shared beginnings and equal rows: exact while they are few, a fair sample in bounded memory when they are many."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.core.messages import pack
from nvcli.tools.check.prefixes import SeenKeys, SharedBlocks

BLOCK = 4


def saved_tokens(prompts: list[list[int]]) -> int:
    """What a cache saves that keeps every block for ever; of a prompt the last token is computed."""
    seen: set[tuple[int, ...]] = set()
    saved = 0
    for prompt in prompts:
        for end in range(BLOCK, len(prompt), BLOCK):
            saved += BLOCK * (tuple(prompt[:end]) in seen)
            seen.add(tuple(prompt[:end]))
    return saved


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=30))
def test_few_blocks_are_counted_exactly(prompts: list[list[int]]) -> None:
    blocks = SharedBlocks(BLOCK)
    for prompt in prompts:
        blocks.add(pack(prompt))
    assert blocks.is_exact
    assert blocks.num_tokens == saved_tokens(prompts)


def test_prompts_under_different_adapters_share_nothing() -> None:
    blocks = SharedBlocks(BLOCK)
    for adapter in (0, 1, 2, 1):
        blocks.add(pack(range(BLOCK + 1)), adapter=adapter)
    assert blocks.num_tokens == BLOCK


@pytest.mark.parametrize("together", [True, False])
def test_many_blocks_are_estimated_whatever_their_order(together: bool) -> None:
    rng = random.Random(7)
    prompts = [[number % 5000, *range(8), rng.randrange(1 << 30), 0] for number in range(20_000)]
    if together:
        prompts.sort()
    blocks = SharedBlocks(BLOCK, max_kept=2000)
    for prompt in prompts:
        blocks.add(pack(prompt))
    assert not blocks.is_exact
    assert len(blocks._kept) <= 2000
    assert blocks.num_tokens == pytest.approx(saved_tokens(prompts), rel=0.05)


def test_keys_beyond_the_bound_are_not_kept() -> None:
    keys = [blake2b(bytes([number]), digest_size=16).digest() for number in range(30)]
    seen = SeenKeys(max_kept=20)
    assert [seen.add(key) for key in keys] == [True] * 30
    assert seen.is_full
    assert [seen.add(key) for key in keys] == [False] * 20 + [True] * 10
