"""Blocks of prompts get the hashes of their tokens and of all before them, and common beginnings are hashed once."""

from __future__ import annotations

import random

import pytest

from nvcli.core.messages import pack
from nvcli.engine import prompt_hashes
from nvcli.engine.block_manager import BlockHash, BlockManager, hash_blocks
from nvcli.engine.core import EngineCore
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from requests_factory import make_request
from scheduler_engine import InstantExecutor

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
        runs = hashes._runs
        assert runs._num_bytes == sum(prompt_hashes._size(*each) for each in runs._kept.items()) <= max_bytes


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks that were hashed, call by call."""
    counts: list[int] = []

    def counted(token_bytes: bytes, block_size: int, parent: BlockHash = b"") -> list[BlockHash]:
        new = hash_blocks(token_bytes, block_size, parent)
        counts.append(len(new))
        return new

    monkeypatch.setattr(prompt_hashes, "hash_blocks", counted)
    return counts


def test_a_common_beginning_is_hashed_once(hashed: list[int]) -> None:
    hashes = PromptHashes(BLOCK_SIZE)
    system = list(range(400))
    for row in range(60):
        variant = [1_000 + row % 3] * 200
        hashes.of(pack([*system, *variant, *[2_000 + row] * 9]))
    assert sum(hashed) == 100 + 3 * 50 + 60 * 2


def test_a_prompt_is_hashed_anew_after_prefixes_were_forgotten(hashed: list[int]) -> None:
    """So that each pass of a benchmark costs the same."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=BLOCK_SIZE)
    core = EngineCore(Scheduler(limits, BlockManager(100)), InstantExecutor(), max_in_flight=1)
    for number, expected in enumerate([10, 0, 10]):
        hashed.clear()
        core.scheduler.add([make_request(number, range(40), 1)])
        while core.has_work:
            core.step()
        assert sum(hashed) == expected
        if expected == 0:
            core.scheduler.forget_prefixes()


def test_what_is_kept_takes_bounded_memory() -> None:
    hashes = PromptHashes(BLOCK_SIZE, max_bytes=50_000)
    for row in range(1_000):
        hashes.of(pack([row] * 40))
    assert 0 < len(hashes._runs._kept) <= 50_000 // (160 + 10 * 64 + 512)
