"""Blocks of prompts get the hashes of their tokens and of all before them, and common beginnings are hashed once."""

from __future__ import annotations

import random

import pytest

from nvcli.engine import prompt_hashes
from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.messages import pack

BLOCK_SIZE = 4


@pytest.mark.parametrize("max_bytes", [0, 1_000, 20_000, 1_000_000], ids="keeps {} bytes".format)
def test_hashes_are_those_of_each_prompt_alone(max_bytes: int) -> None:
    rng = random.Random(max_bytes)
    hashes = PromptHashes(BLOCK_SIZE, max_bytes=max_bytes)
    prompts: list[list[int]] = [[]]
    for _ in range(400):
        beginning = rng.choice(prompts)
        rest = [rng.randint(0, 2) for _ in range(rng.choice([0, 1, 4, 7, 40]))]
        prompts.append(beginning[: rng.randint(0, len(beginning))] + rest)
        packed = pack(prompts[-1])
        assert hashes.of(packed) == hash_blocks(packed, BLOCK_SIZE)
        hashes.of(packed).clear()  # the caller's own


def test_a_common_beginning_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counted(token_bytes: bytes, block_size: int, parent: BlockHash = b"") -> list[BlockHash]:
        nonlocal num_hashed
        new = hash_blocks(token_bytes, block_size, parent)
        num_hashed += len(new)
        return new

    monkeypatch.setattr(prompt_hashes, "hash_blocks", counted)
    hashes = PromptHashes(BLOCK_SIZE)
    system = list(range(400))
    for row in range(60):
        variant = [1_000 + row % 3] * 200
        hashes.of(pack([*system, *variant, *[2_000 + row] * 9]))
    assert num_hashed == 100 + 3 * 50 + 60 * 2


def test_what_is_kept_takes_bounded_memory() -> None:
    hashes = PromptHashes(BLOCK_SIZE, max_bytes=50_000)
    for row in range(1_000):
        hashes.of(pack([row] * 40))
    assert 0 < len(hashes._runs) <= 50_000 // (160 + 512)
