"""The groups of a step's prefill chunks that are attended together to the prefix that they share.

A tile of the prefill kernel takes tokens of one chunk, and computes as much for a few tokens as for a full tile. Short
chunks behind the same prefix fill tiles together: over the keys of the prefix, which all of their tokens see, it does
not matter whose tokens they are. A group is a run of chunks whose requests begin with the same blocks. The chunks of
a step are sorted by their blocks, so that those which share most stand side by side.

Groups are chosen anew for each step, from the block tables. Of a tree of prefixes a chunk is in one group at most, with
which it shares as much as is worth it: tiles need not be fuller than full, so there are no levels as in
`segment_forest.py`. This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nvcli.engine.segment_forest import num_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCosts:
    """Costs that decide whether chunks are attended together, in keys of a layer that one tile attends to.

    Measured on an H200 with 32 query heads and 8 KV heads of 128 in bf16, where a tile of 128 rows attends to 1,000
    keys, in all KV heads, in 0.84 us of the whole GPU's time.
    """

    tile_tokens: int
    """The tokens that fill a tile (`EngineReady.prefix_tile_tokens`)."""
    token: float = 6.0
    """Extra cost per token: its result over the prefix is written and read again. 8,192 tokens take 157 us over 512
    keys and 449 over 2,048."""
    least_gain: float = 2_048
    """A group is worth it once it gains so much."""
    least_gain_in_step: float = 32_768
    """Groups are worth it in a step in which all of them gain so much, as each layer has two launches more."""


class Chunk(NamedTuple):
    """A prefill chunk of a step."""

    tables: Sequence[list[int]]
    """The request's blocks in each KV group."""
    num_before: int
    """Tokens of the request before the chunk."""
    num_tokens: int


class ChunkGroup(NamedTuple):
    """Chunks that are attended together to the keys that they share."""

    first: int
    """The place of the first chunk among those of the step, in their new order."""
    num_chunks: int
    num_keys: int


class Arrangement(NamedTuple):
    """The chunks of a step in an order in which those of a group stand side by side."""

    order: list[int]
    """The numbers of the chunks."""
    groups: list[ChunkGroup]
    """The groups, at least one."""


@dataclass(slots=True)
class _Run:
    """Neighbours, and what attending them together saves and costs."""

    first: int
    num_blocks: int
    """Blocks that all of them begin with."""
    count: int = 0
    tiles_saved: float = 0.0
    """Tiles of the chunks alone, less their part of full tiles."""
    cost: float = 0.0


class ChunkGroups:
    """Finds groups among the chunks of steps."""

    def __init__(
        self, kv_groups: Sequence[int], block_size: int, costs: PrefixCosts | None, *, token_bytes: int = 0
    ) -> None:
        """`kv_groups`: the numbers of the KV groups of full attention; `token_bytes`: what a token takes in all of
        them. `costs`: None where the ranks attend to every chunk by itself; then there are no groups."""
        self._kv_groups, self._block_size, self._token_bytes = kv_groups, block_size, token_bytes
        self._costs = costs if kv_groups else None
        self.num_bytes_saved = 0
        """The bytes of keys and values that steps did not read, because a tile had tokens of several chunks."""

    def arrange(self, chunks: Sequence[Chunk]) -> Arrangement | None:
        """Sort the chunks of a step and find the groups that are worth it; None: there are none."""
        if self._costs is None or len(chunks) < 2:
            return None
        tables = [chunk.tables[self._kv_groups[0]] for chunk in chunks]
        if len({table[0] for table in tables}) == len(chunks):
            return None
        prefixes = [table[: chunk.num_before // self._block_size] for table, chunk in zip(tables, chunks, strict=True)]
        order = sorted(range(len(chunks)), key=lambda number: prefixes[number])
        runs = self._find([chunks[number] for number in order])
        if not runs:
            return None
        saved = sum(int(run.tiles_saved) * run.num_blocks for run in runs) * self._block_size
        self.num_bytes_saved += saved * self._token_bytes
        return Arrangement(order, [ChunkGroup(run.first, run.count, run.num_blocks * self._block_size) for run in runs])

    def _find(self, chunks: Sequence[Chunk]) -> list[_Run]:
        """Return the runs of neighbours that are worth it."""
        assert self._costs is not None
        worthy: list[_Run] = []
        total = 0.0
        run: _Run | None = None
        for number, pair in enumerate(pairwise(chunks), 1):
            num_common = self._num_common(*pair)
            if run is None:
                if num_common:
                    run = _Run(number - 1, num_common)
                    self._extend(run, num_common, pair[0])
                    self._extend(run, num_common, pair[1])
            elif not self._extend(run, num_common, pair[1]):
                total += self._close(run, worthy)
                run = None
        if run is not None:
            total += self._close(run, worthy)
        return worthy if total >= self._costs.least_gain_in_step else []

    def _extend(self, run: _Run, num_common: int, chunk: Chunk) -> bool:
        """Add a chunk that shares so many blocks with the one before it, unless the run is worth more without it: where
        it shares less than the others do, or gains nothing. Return whether it was added."""
        assert self._costs is not None
        tile_tokens, num_tokens = self._costs.tile_tokens, chunk.num_tokens
        num_blocks = min(run.num_blocks, num_common)
        tiles_saved = run.tiles_saved + -(-num_tokens // tile_tokens) - num_tokens / tile_tokens
        cost = run.cost + self._costs.token * num_tokens
        if run.count > 1:
            # A run that begins with the chunk has a tile of its own that is nearly empty.
            least = self._value(run) - num_blocks * self._block_size
            if num_blocks == 0 or tiles_saved * num_blocks * self._block_size - cost < least:
                return False
        run.num_blocks, run.tiles_saved, run.cost = num_blocks, tiles_saved, cost
        run.count += 1
        return True

    def _close(self, run: _Run, worthy: list[_Run]) -> float:
        """Add a run that is worth it to `worthy`; return what it gains, but for its last tile, which may be nearly
        empty."""
        assert self._costs is not None
        gain = self._value(run) - run.num_blocks * self._block_size
        if gain < self._costs.least_gain:
            return 0.0
        worthy.append(run)
        return gain

    def _value(self, run: _Run) -> float:
        return run.tiles_saved * run.num_blocks * self._block_size - run.cost

    def _num_common(self, left: Chunk, right: Chunk) -> int:
        """Count the blocks that two requests begin with, up to those of the chunks' own tokens."""
        num_blocks: int | None = None
        for group in self._kv_groups:
            one, other = left.tables[group], right.tables[group]
            if one[0] != other[0]:
                return 0
            if num_blocks is None:
                num_blocks = min(left.num_before, right.num_before) // self._block_size
            num_blocks = num_equal(one[:num_blocks], other[:num_blocks])
        return num_blocks or 0
