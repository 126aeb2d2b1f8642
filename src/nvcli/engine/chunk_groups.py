"""The groups of a step's prefill chunks that attend together to a prefix that they share.

A tile of the prefill kernel takes tokens of one chunk, and costs as much for a few tokens as for a full tile. Short
chunks with the same prefix fill tiles together: all of their tokens see the keys of the prefix, so it does not matter
whose they are. A group is a run of chunks whose requests begin with the same blocks. A step's chunks are sorted by
their blocks, so that those that share most are adjacent.

Groups are chosen anew for each step, from the block tables. In a tree of prefixes a chunk joins at most one group, the
one with the most worthwhile prefix: full tiles gain nothing more, so there are no levels as in `segment_forest.py`.
This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nvcli.engine.segment_forest import num_equal
from nvcli.engine.state import RequestState
from nvcli.kernels.whole_numbers import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCosts:
    """Costs that decide whether chunks attend together, in keys of a layer that one tile attends to.

    Measured on an H200 with 32 query heads and 8 KV heads of 128 in bf16, where a tile of 128 rows attends to 1,000
    keys, in all KV heads, in 0.84 us of the whole GPU's time.
    """

    tile_tokens: int
    """The tokens that fill a tile (`EngineReady.prefix_tile_tokens`)."""
    token: float = 6.0
    """Extra cost per token: its result for the prefix is written and read again. 8,192 tokens take 157 us over 512 keys
    and 449 us over 2,048."""
    least_gain: float = 2_048
    """Minimum gain of a group."""
    least_gain_in_step: float = 32_768
    """Minimum gain of all groups of a step, because they cost two more launches in each layer."""


class Chunk(NamedTuple):
    """A prefill chunk of the step being planned: the last `num_tokens` of a request's computed tokens."""

    state: RequestState
    num_tokens: int

    @property
    def start(self) -> int:
        """Tokens of the request before the chunk."""
        return self.state.num_computed - self.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether it ends what is known of the request, so that its last token has logits."""
        return self.state.num_uncomputed == 0


class ChunkGroup(NamedTuple):
    """Chunks that attend together to the keys that they share."""

    first: int
    """The first chunk's position in the step's new order."""
    num_chunks: int
    num_keys: int


@dataclass(slots=True)
class _Run:
    """Adjacent chunks, and the cost and gain of letting them attend together."""

    first: int
    num_blocks: int
    """Blocks with which all of them begin."""
    count: int = 0
    tiles_saved: float = 0.0
    """Tiles that the chunks would take alone, minus their share of full tiles."""
    cost: float = 0.0


class ChunkGroups:
    """Finds groups among the chunks of steps."""

    def __init__(
        self, kv_groups: Sequence[int], block_size: int, costs: PrefixCosts | None, *, token_bytes: int = 0
    ) -> None:
        """`kv_groups`: the numbers of the KV groups of full attention; `token_bytes`: bytes per token in all of them.
        `costs`: None if the ranks process each chunk on its own; then there are no groups."""
        self._kv_groups, self._block_size, self._token_bytes = kv_groups, block_size, token_bytes
        self._costs = costs if kv_groups else None
        self.num_bytes_saved = 0
        """Bytes of keys and values that steps did not read, because one tile had tokens of several chunks."""

    def arrange(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[ChunkGroup]]:
        """Find the worthwhile groups among the chunks of a step. Returns the chunks, sorted if there are groups, and
        the groups."""
        if self._costs is None or len(chunks) < 2:
            return chunks, []
        first_group = self._kv_groups[0]
        if len({chunk.state.blocks[first_group][0] for chunk in chunks}) == len(chunks):
            return chunks, []
        in_order = sorted(chunks, key=lambda chunk: chunk.state.blocks[first_group][: chunk.start // self._block_size])
        runs = self._find(in_order)
        if not runs:
            return chunks, []
        saved = sum(int(run.tiles_saved) * run.num_blocks for run in runs) * self._block_size
        self.num_bytes_saved += saved * self._token_bytes
        return in_order, [ChunkGroup(run.first, run.count, run.num_blocks * self._block_size) for run in runs]

    def _find(self, chunks: Sequence[Chunk]) -> list[_Run]:
        """Return the worthwhile runs of adjacent chunks."""
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
        """Add a chunk that shares `num_common` blocks with the previous one, unless the run is better off without it:
        if it shares less than the others do, or gains nothing. Return whether it was added."""
        assert self._costs is not None
        tile_tokens, num_tokens = self._costs.tile_tokens, chunk.num_tokens
        num_blocks = min(run.num_blocks, num_common)
        tiles_saved = run.tiles_saved + ceil_div(num_tokens, tile_tokens) - num_tokens / tile_tokens
        cost = run.cost + self._costs.token * num_tokens
        if run.count > 1:
            # A run starting with this chunk would have an almost empty tile of its own.
            least = self._value(run) - num_blocks * self._block_size
            if num_blocks == 0 or tiles_saved * num_blocks * self._block_size - cost < least:
                return False
        run.num_blocks, run.tiles_saved, run.cost = num_blocks, tiles_saved, cost
        run.count += 1
        return True

    def _close(self, run: _Run, worthy: list[_Run]) -> float:
        """Add a run to `worthy` if it is worthwhile; return its gain, not counting a last tile that may be almost
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
        """Count the leading blocks that two requests share, up to those of the chunks' own tokens."""
        num_blocks: int | None = None
        for group in self._kv_groups:
            one, other = left.state.blocks[group], right.state.blocks[group]
            if one[0] != other[0]:
                return 0
            if num_blocks is None:
                num_blocks = min(left.start, right.start) // self._block_size
            num_blocks = num_equal(one[:num_blocks], other[:num_blocks])
        return num_blocks or 0
