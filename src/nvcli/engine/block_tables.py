"""BlockTables: the KV blocks of each request, by KV group.

A KV group is a list of layers that keep the same blocks. A request has one block table for each group. It grows as the
request advances and is cut back to the request's upper bound when a step gave fewer tokens than it might have.
The blocks of a group with a window are freed once no step that is still to be scheduled can attend to them: by the
*least* number of tokens that the request has computed, since more than that is not certain until counts arrive.
Freed blocks may be given away at once, although steps in flight still read them: steps run in order.

A prefix is reused as far as every group allows. A group without a window needs all of its blocks; one with a window
needs those that the first token behind the prefix attends to.

Rows of one step may share blocks of keys that one of them fills, because keys are stored before they are read.
Recurrent states are not: a request that would go on from a state of the step being planned waits for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvcli.engine.block_manager import BlockHash, BlockManager
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import StepDraft


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A group of layers that keep the same blocks."""

    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all tokens before it."""
    is_state: bool = False
    """Whether a block holds the recurrent state behind its last token, and not keys. Its window is of two tokens: a
    token goes on from the state behind the one before it."""

    def first_column(self, position: int, block_size: int) -> int:
        """The first column of a block table that a token at `position`, or one behind it, attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """The most blocks that are held at a time when `num_tokens` tokens are computed one by one."""
        blocks = -(-num_tokens // block_size)
        return blocks if self.window is None else min(blocks, -(-(self.window - 1) // block_size) + 1)


class BlockTables:
    """Takes blocks from a BlockManager for requests, and gives them back."""

    def __init__(self, block_manager: BlockManager, groups: Sequence[KVGroup], block_size: int) -> None:
        self.block_manager = block_manager
        self.block_size = block_size
        self._groups = tuple(groups)
        self._num_full = sum(group.window is None for group in groups)
        self._windowed = [number for number, group in enumerate(groups) if group.window is not None]
        self._of_states = [number for number, group in enumerate(groups) if group.is_state]
        self._new_states: set[int] = set()
        """Blocks of states that were registered since the step being planned was begun."""

    def begin_step(self) -> None:
        """Note that a step is planned next: those planned before will have filled their blocks when it runs."""
        self._new_states.clear()

    def can_fit(self, num_tokens: int) -> bool:
        """Whether a request that runs alone can compute `num_tokens` tokens."""
        needed = sum(group.most_blocks(num_tokens, self.block_size) for group in self._groups)
        return needed <= self.block_manager.num_blocks

    def reserve(self, num_requests: int, num_tokens: int) -> int:
        """The most blocks that `num_requests` decoding requests take for `num_tokens` more tokens each."""
        return num_requests * len(self._groups) * -(-num_tokens // self.block_size)

    def enter(self, state: RequestState, *, reserve: int) -> bool:
        """Take the blocks with which a waiting request begins, cached ones first, and set `num_computed` accordingly.

        Groups without a window get blocks for all known tokens, groups with one for the first token to compute.
        Returns False, and takes nothing, if fewer than `reserve` free blocks would be left, or if it would go on from a
        state that is not there before this step.
        """
        block_size, manager = self.block_size, self.block_manager
        num_tokens = state.num_tokens
        # The last token is always computed: its logits are wanted.
        num_reusable = (num_tokens - 1) // block_size if manager.enable_prefix_caching else 0
        if state.reads is not None and (unread := state.reads.first_unread) is not None:
            num_reusable = min(num_reusable, unread // block_size)
        state.blocks, state.first_columns = self._match(state.hash_blocks(0, num_reusable, block_size))
        num_cached = len(state.blocks[0])
        if num_cached and any(state.blocks[group][-1] in self._new_states for group in self._of_states):
            self.release(state)
            return False
        num_fresh = -(-num_tokens // block_size) - num_cached
        fresh = manager.allocate(num_fresh * self._num_full + len(self._windowed), reserve=reserve)
        if fresh is None:
            self.release(state)
            return False
        for blocks, group in zip(state.blocks, self._groups, strict=True):
            count = num_fresh if group.window is None else 1
            blocks += fresh[:count]
            del fresh[:count]
        state.num_computed = num_cached * block_size
        state.set_hashed_blocks(num_cached, block_size)
        state.capacity = len(min(state.blocks, key=len)) * block_size
        return True

    def grow(self, state: RequestState, num_tokens: int, draft: StepDraft, *, least: int, reserve: int = 0) -> int:
        """Take blocks for a request's next `num_tokens` tokens, or for fewer if there are too few free blocks.

        Returns the number of tokens that there is room for. If that is less than `least`, no block is taken. The last
        `reserve` free blocks are never taken.
        """
        if self._windowed:
            self._free_behind_windows(state)
        block_size, manager = self.block_size, self.block_manager
        num_columns = -(-(state.num_computed + num_tokens) // block_size)
        num_free = manager.num_free - reserve
        while (num_missing := _num_missing(state, num_columns)) > max(0, num_free):
            num_columns -= 1
            num_tokens = num_columns * block_size - state.num_computed
        if num_tokens < least:
            return num_tokens
        if num_missing:
            fresh = manager.allocate(num_missing)
            assert state.slot is not None
            assert fresh is not None
            for group, blocks in enumerate(state.blocks):
                count = num_columns - len(blocks)
                if count > 0:
                    draft.add_blocks(group, state.slot, len(blocks), fresh[:count])
                    blocks += fresh[:count]
                    del fresh[:count]
            state.capacity = num_columns * block_size
        return num_tokens

    def trim(self, state: RequestState) -> None:
        """Give back the blocks that a request no longer needs because its upper bound was lowered."""
        num_columns = -(-state.num_computed // self.block_size)
        if state.capacity <= num_columns * self.block_size:
            return
        for blocks in state.blocks:
            self.block_manager.release(blocks[num_columns:])
            del blocks[num_columns:]
        state.capacity = num_columns * self.block_size
        state.set_hashed_blocks(min(state.num_hashed_blocks, num_columns), self.block_size)

    def register(self, state: RequestState) -> list[int]:
        """Register for reuse, and return, the blocks that submitted steps have newly filled with known tokens."""
        block_size, manager = self.block_size, self.block_manager
        num_full = min(state.num_tokens, state.num_computed) // block_size
        first = state.num_hashed_blocks
        if num_full <= first:
            return []
        state.set_hashed_blocks(num_full, block_size)
        if not manager.enable_prefix_caching:
            return []
        hashes = state.hash_blocks(first, num_full, block_size)
        registered = []
        for group, blocks in enumerate(state.blocks):
            for column in range(max(first, state.first_columns[group]), num_full):
                manager.register(blocks[column], hashes[column - first], group)
                registered.append(blocks[column])
        for group in self._of_states:
            self._new_states.update(state.blocks[group][max(first, state.first_columns[group]) : num_full])
        return registered

    def forget(self, state: RequestState) -> None:
        """Make the blocks that hold a request's tokens unfindable, whoever filled them."""
        hashes = state.hash_blocks(0, state.num_tokens // self.block_size, self.block_size)
        groups = range(len(self._groups))
        found = [self.block_manager.find(block_hash, group) for block_hash in hashes for group in groups]
        self.block_manager.unregister(block for block in found if block is not None)

    def release(self, state: RequestState) -> None:
        """Give all of a request's blocks back."""
        for blocks, first in zip(state.blocks, state.first_columns, strict=True):
            self.block_manager.release(blocks[first:] if first else blocks)
        state.blocks = []
        state.first_columns = []
        state.capacity = 0
        state.set_hashed_blocks(0, self.block_size)

    def _match(self, hashes: Sequence[BlockHash]) -> tuple[list[list[int]], list[int]]:
        """Find the longest cached prefix and take a reference of its blocks.

        Returns each group's blocks, equally many, and how many leading ones its window does not need; those are 0.
        """
        found = [self._find(hashes, group) for group in range(len(self._groups))]
        num_cached = len(min(found, key=len))
        if num_cached == 0:
            return [[] for _ in self._groups], [0] * len(self._groups)
        runs = {group: _run_lengths(found[group]) for group in self._windowed}
        while any(
            runs[group][num_cached] < num_cached - self._first_column(group, num_cached) for group in self._windowed
        ):
            num_cached -= 1
        first_columns = [self._first_column(group, num_cached) for group in range(len(self._groups))]
        for blocks, first in zip(found, first_columns, strict=True):
            del blocks[num_cached:]
            blocks[:first] = [0] * first
            self.block_manager.hold(blocks[first:])
        return found, first_columns

    def _find(self, hashes: Sequence[BlockHash], group: int) -> list[int]:
        """Find the blocks that a group has registered for these hashes. The result ends before the first missing block;
        in a group with a window it has a 0 for each missing one."""
        blocks = []
        for block_hash in hashes:
            block = self.block_manager.find(block_hash, group)
            if block is None and self._groups[group].window is None:
                break
            blocks.append(block or 0)
        return blocks

    def _first_column(self, group: int, num_blocks: int) -> int:
        """The first block that the token behind `num_blocks` full blocks attends to."""
        return self._groups[group].first_column(num_blocks * self.block_size, self.block_size)

    def _free_behind_windows(self, state: RequestState) -> None:
        for number in self._windowed:
            blocks, start = state.blocks[number], state.first_columns[number]
            end = self._groups[number].first_column(state.least_computed, self.block_size)
            if end > start:
                self.block_manager.release(blocks[start:end])
                blocks[start:end] = [0] * (end - start)
                state.first_columns[number] = end

    def check_integrity(self, running: Sequence[RequestState]) -> None:
        """Assert that the running requests' tables agree with the block manager and with how far the requests are."""
        self.block_manager.check_integrity(
            blocks[first:] for state in running for blocks, first in zip(state.blocks, state.first_columns, strict=True)
        )
        for state in running:
            assert len(state.blocks) == len(state.first_columns) == len(self._groups)
            num_columns = -(-state.num_computed // self.block_size)
            assert state.capacity == min(map(len, state.blocks)) * self.block_size >= state.num_computed
            if state.num_pending or not state.num_uncomputed:
                assert all(len(blocks) == num_columns for blocks in state.blocks), "not the blocks of its upper bound"
            for group, blocks, first in zip(self._groups, state.blocks, state.first_columns, strict=True):
                assert not any(blocks[:first])
                assert all(blocks[first:])
                assert first <= group.first_column(state.least_computed, self.block_size), "freed inside the window"


def _num_missing(state: RequestState, num_columns: int) -> int:
    """Count the blocks that a request lacks for `num_columns` columns in each group."""
    num_missing = 0
    for blocks in state.blocks:
        if len(blocks) < num_columns:
            num_missing += num_columns - len(blocks)
    return num_missing


def _run_lengths(blocks: Sequence[int]) -> list[int]:
    """Count for each n, from 0 on, how many blocks at the end of the first n are present (not 0) without a gap."""
    runs = [0]
    for block in blocks:
        runs.append(runs[-1] + 1 if block else 0)
    return runs
