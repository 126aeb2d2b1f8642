"""The groups of a step's prefill chunks that are attended together to the prefix that they share.

A tile of the prefill kernel takes tokens of one chunk, and computes as much for a few tokens as for a full tile. Short
chunks behind the same prefix fill tiles together: over the keys of the prefix, which all of their tokens see, it does
not matter whose tokens they are. A group is a run of neighbouring chunks whose requests begin with the same blocks.
Rows that begin alike reach the scheduler one behind the other, so neighbours are all that is looked at.

Groups are chosen anew for each step, from the block tables. Of a tree of prefixes a chunk is in one group at most, with
which it shares as much as is worth it: tiles need not be fuller than full, so there are no levels as in
`segment_forest.py`. This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nvcli.engine.segment_forest import num_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCosts:
    """What decides whether chunks are attended together, in keys of a layer that one tile attends to.

    A tile attends to 1,000 keys in all of 8 KV heads in about 0.9 us on an H200 that computes 600 TFLOP/s.
    """

    tile_tokens: int
    """The tokens that fill a tile (`EngineReady.prefix_tile_tokens`)."""
    token: float = 5.0
    """What a token takes more: its result over the prefix is written and read again."""
    chunk: float = 64.0
    """What a chunk takes more: the tiles of its rest begin, and end, once more."""
    least_gain: float = 2_048
    """A group is worth it once it gains so much."""
    least_gain_in_step: float = 32_768
    """Groups are worth it in a step in which all of them gain so much, as each layer has a launch more."""


class Chunk(NamedTuple):
    """A prefill chunk of a step."""

    tables: Sequence[Sequence[int]]
    """The request's blocks in each KV group."""
    num_before: int
    """Tokens of the request before the chunk."""
    num_tokens: int


class ChunkGroup(NamedTuple):
    """Chunks that are attended together to the keys that they share."""

    first: int
    """The number of the first chunk in the step."""
    num_chunks: int
    num_keys: int


@dataclass(slots=True)
class _Run:
    """Neighbouring chunks, and what attending them together saves and costs."""

    first: int
    num_blocks: int
    """Blocks that all of them begin with; of a lone chunk, all before it."""
    count: int = 0
    tiles_saved: float = 0.0
    """Tiles of the chunks alone, less their part of full tiles."""
    cost: float = 0.0


class ChunkGroups:
    """Finds groups among the chunks of steps."""

    def __init__(self, kv_groups: Sequence[int], block_size: int, costs: PrefixCosts | None) -> None:
        """`kv_groups`: the numbers of the KV groups of full attention. `costs`: None where the ranks attend to every
        chunk by itself; then there are no groups."""
        self._kv_groups, self._block_size = kv_groups, block_size
        self._costs = costs if kv_groups else None

    def find(self, chunks: Sequence[Chunk]) -> list[ChunkGroup]:
        """Return the groups that are worth it in a step with these chunks."""
        costs = self._costs
        if costs is None or len(chunks) < 2:
            return []
        groups: list[ChunkGroup] = []
        total = 0.0
        run = self._begin(chunks, 0)
        for number in range(1, len(chunks) + 1):
            if number < len(chunks) and self._extend(run, chunks, number):
                continue
            # A group's last tile may be nearly empty.
            gain = self._value(run, run.num_blocks) - run.num_blocks * self._block_size
            if run.count > 1 and gain >= costs.least_gain:
                groups.append(ChunkGroup(run.first, run.count, run.num_blocks * self._block_size))
                total += gain
            if number < len(chunks):
                run = self._begin(chunks, number)
        return groups if total >= costs.least_gain_in_step else []

    def _begin(self, chunks: Sequence[Chunk], number: int) -> _Run:
        run = _Run(number, chunks[number].num_before // self._block_size)
        self._add(run, chunks[number])
        return run

    def _add(self, run: _Run, chunk: Chunk) -> None:
        assert self._costs is not None
        tile_tokens, num_tokens = self._costs.tile_tokens, chunk.num_tokens
        run.count += 1
        run.tiles_saved += -(-num_tokens // tile_tokens) - num_tokens / tile_tokens
        run.cost += self._costs.chunk + self._costs.token * num_tokens

    def _extend(self, run: _Run, chunks: Sequence[Chunk], number: int) -> bool:
        """Add a chunk to a run, unless the run is worth more without it: where it shares less than the others do, or
        gains nothing. Return whether it was added."""
        num_blocks = min(run.num_blocks, self._num_common(chunks[number - 1], chunks[number]))
        if num_blocks == 0:
            return False
        longer = _Run(run.first, num_blocks, run.count, run.tiles_saved, run.cost)
        self._add(longer, chunks[number])
        # What comes behind a run needs a tile more.
        least = self._value(run, run.num_blocks) - num_blocks * self._block_size
        if run.count > 1 and self._value(longer, num_blocks) < least:
            return False
        run.num_blocks, run.count, run.tiles_saved, run.cost = num_blocks, longer.count, longer.tiles_saved, longer.cost
        return True

    def _value(self, run: _Run, num_blocks: int) -> float:
        return run.tiles_saved * num_blocks * self._block_size - run.cost

    def _num_common(self, left: Chunk, right: Chunk) -> int:
        """Count the blocks that two requests begin with, up to those of the chunks' own tokens."""
        num_blocks = min(left.num_before, right.num_before) // self._block_size
        for group in self._kv_groups:
            one, other = left.tables[group], right.tables[group]
            if num_blocks == 0 or one[0] != other[0]:
                return 0
            num_blocks = num_equal(one[:num_blocks], other[:num_blocks])
        return num_blocks
