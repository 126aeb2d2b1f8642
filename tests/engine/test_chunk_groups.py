"""Which prefill chunks of a step are attended together to the prefix that they share."""

from __future__ import annotations

import random
from itertools import accumulate, count

from nvcli.engine.chunk_groups import Chunk, ChunkGroup, ChunkGroups, PrefixCosts
from nvcli.engine.state import Prompt, RequestState
from requests_factory import make_request

COSTS = PrefixCosts(tile_tokens=32)
EAGER = PrefixCosts(tile_tokens=32, token=0, least_gain=1, least_gain_in_step=1)
BLOCK_SIZE = 64


class Tables:
    """Makes chunks whose requests begin with given prefixes, in one KV group."""

    def __init__(self) -> None:
        self._fresh = count(1)

    def blocks(self, num: int) -> list[int]:
        return [next(self._fresh) for _ in range(num)]

    def chunk(self, prefix: list[int], num_tokens: int, *, own: int = 0) -> Chunk:
        """A chunk behind a prefix and `own` blocks more that are in the cache."""
        before = prefix + self.blocks(own)
        return make_chunk([before + self.blocks(-(-num_tokens // BLOCK_SIZE))], len(before) * BLOCK_SIZE, num_tokens)


def make_chunk(blocks: list[list[int]], num_before: int, num_tokens: int) -> Chunk:
    """A chunk of a request with these blocks in each KV group."""
    request = make_request(0, [1], 1)
    return Chunk(
        RequestState(request, Prompt(request), blocks=blocks, num_computed=num_before + num_tokens), num_tokens
    )


def arrange(
    chunks: list[Chunk], costs: PrefixCosts | None = COSTS, kv_groups: tuple[int, ...] = (0,)
) -> tuple[list[int], list[ChunkGroup]]:
    in_order, groups = ChunkGroups(kv_groups, BLOCK_SIZE, costs).arrange(chunks)
    return [chunks.index(chunk) for chunk in in_order], groups


def find(chunks: list[Chunk], costs: PrefixCosts | None = COSTS, kv_groups: tuple[int, ...] = (0,)) -> list[ChunkGroup]:
    return arrange(chunks, costs, kv_groups)[1]


def test_short_chunks_behind_a_prefix_are_a_group() -> None:
    """The first one computes the prefix, and attends to it on its own."""
    tables = Tables()
    first = make_chunk([tables.blocks(33)], 0, 2056)
    prefix = list(first.state.blocks[0][:32])
    chunks = [first, *[tables.chunk(prefix, 8) for _ in range(100)]]
    assert find(chunks) == [ChunkGroup(1, 100, 2048)]


def test_every_prefix_has_its_group() -> None:
    """In whatever order the chunks come; those of a group keep theirs."""
    tables = Tables()
    prefixes = [tables.blocks(num) for num in (8, 32, 16)]
    chunks = [tables.chunk(prefixes[number % 3], 8) for number in range(180)]
    chunks.insert(60, tables.chunk([], 500))
    order, groups = arrange(chunks)
    assert groups == [ChunkGroup(1, 60, 512), ChunkGroup(61, 60, 2048), ChunkGroup(121, 60, 1024)]
    assert order[0] == 60
    assert order[1:61] == [number for number in range(181) if chunks[number].state.blocks[0][0] == prefixes[0][0]]
    assert sorted(order) == list(range(181))


def test_of_a_tree_each_chunk_shares_what_is_worth_most() -> None:
    """Variants with many requests each are groups of their own; those with few are one group of what all share."""
    tables = Tables()
    root = tables.blocks(32)
    variants = [root + tables.blocks(16) for _ in range(4)]
    assert find([tables.chunk(variant, 8) for _ in range(64) for variant in variants]) == [
        ChunkGroup(first, 64, 3072) for first in (0, 64, 128, 192)
    ]
    variants = [root + tables.blocks(1) for _ in range(100)]
    assert find([tables.chunk(variant, 8) for variant in variants for _ in range(2)]) == [ChunkGroup(0, 200, 2048)]


def test_what_gains_nothing_is_left_alone() -> None:
    tables = Tables()
    prefix = tables.blocks(32)

    def found(number: int, num_tokens: int, blocks: list[int] = prefix) -> list[ChunkGroup]:
        return find([tables.chunk(blocks, num_tokens) for _ in range(number)])

    assert found(1, 8) == []
    assert found(8, 8) == [], "too few"
    assert found(100, 32) == [], "they fill their tiles"
    assert found(100, 640) == []
    assert found(400, 8, prefix[:1]) == [], "too short a prefix"
    assert found(100, 8) != []
    assert found(100, 40) != [], "the second tile of each is nearly empty"
    assert find([tables.chunk(tables.blocks(32), 8) for _ in range(100)]) == [], "nothing is shared"


def test_a_chunk_that_fills_its_tiles_does_not_break_a_group() -> None:
    tables = Tables()
    prefix = tables.blocks(32)
    assert find([tables.chunk(prefix, 32 if i % 10 == 5 else 8) for i in range(200)]) == [ChunkGroup(0, 200, 2048)]


def test_ranks_that_attend_to_each_chunk_alone_are_told_nothing() -> None:
    tables = Tables()
    prefix = tables.blocks(32)
    chunks = [tables.chunk(prefix, 8) for _ in range(100)]
    assert find(chunks, None) == find(chunks, COSTS, ()) == []


def test_what_is_not_read_is_counted() -> None:
    """100 chunks of 8 tokens fill 25 tiles and not 100."""
    tables = Tables()
    prefix = tables.blocks(32)
    groups = ChunkGroups((0,), BLOCK_SIZE, COSTS, token_bytes=10)
    for steps in 1, 2:
        groups.arrange([tables.chunk(prefix, 8) for _ in range(100)])
        assert groups.num_bytes_saved == steps * 75 * 2048 * 10
    groups.arrange([tables.chunk(prefix, 8) for _ in range(5)])
    assert groups.num_bytes_saved == 2 * 75 * 2048 * 10


def test_a_prefix_is_shared_in_all_kv_groups() -> None:
    """Where two requests hold different copies of a block in one of them, they share what is before it."""
    tables = Tables()
    one, other = tables.blocks(32), tables.blocks(32)
    chunks = [make_chunk([one + tables.blocks(1), other[:20] + tables.blocks(13)], 2048, 8) for _ in range(100)]
    assert find(chunks, COSTS, (0,)) == [ChunkGroup(0, 100, 2048)]
    assert find(chunks, COSTS, (0, 1)) == [ChunkGroup(0, 100, 20 * BLOCK_SIZE)]


def test_random_trees() -> None:
    """What a group is told to share, its requests hold, before all of their chunks' tokens."""
    rng = random.Random(0)
    num_groups = 0
    for _ in range(200):
        tables = Tables()
        tree: list[list[int]] = [[]]
        for _ in range(rng.randint(1, 8)):
            tree.append(rng.choice(tree) + tables.blocks(rng.randint(1, 20)))
        chunks = [
            tables.chunk(rng.choice(tree[-3:]), rng.choice([1, 8, 32, 100]), own=rng.choice([0, 0, 2]))
            for _ in range(rng.randint(1, 40))
        ]
        order, groups = arrange(chunks, rng.choice([COSTS, EAGER]))
        num_groups += len(groups)
        ends = list(accumulate((group.first + group.num_chunks for group in groups), max, initial=0))
        for group, end in zip(groups, ends, strict=False):
            assert group.first >= end
            assert group.num_chunks > 1
            members = [chunks[number] for number in order[group.first : group.first + group.num_chunks]]
            num_blocks = group.num_keys // BLOCK_SIZE
            assert num_blocks > 0
            assert len({tuple(chunk.state.blocks[0][:num_blocks]) for chunk in members}) == 1
            assert min(chunk.start for chunk in members) >= group.num_keys
    assert num_groups > 100
