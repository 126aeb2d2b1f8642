"""BlockTables: the KV blocks of each request, by KV group.

A KV group is a list of layers that keep the same blocks. A request has one block table for each group. It grows as the
request advances and is cut back to the request's upper bound when a step gave fewer tokens than it could have. The
blocks of a group with a window are freed once no future step can attend to them: by the *least* number of tokens that
the request has computed, since more is not certain until counts arrive. Freed blocks may be reused at once, although
steps in flight still read them: steps run in order.

A prefix is reused as far as every group allows. A group without a window needs all of its blocks; one with a window
needs those that the first token after the prefix attends to. Tables are counted in columns of `block_size` tokens. In
some groups a block spans several columns, so that prefixes end behind a whole number of the widest spans.

Rows of one step may share blocks of keys that one of them fills, because keys are stored before they are read. Groups
with recurrent states have rules of their own (`state_blocks.py`).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from nvcli.core.messages import pack
from nvcli.engine.block_manager import BlockHash, BlockManager
from nvcli.engine.chunk_groups import ChunkGroups
from nvcli.engine.key_copies import KeyCopies
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.shared_segments import SharedSegments
from nvcli.engine.state import RequestState
from nvcli.engine.state_blocks import StateBlocks, different
from nvcli.engine.step_draft import StepDraft
from nvcli.engine.whole_images import whole_chunk
from nvcli.kernels.whole_numbers import ceil_div


class BlockTables:
    """Takes blocks from a BlockManager for requests, and gives them back."""

    def __init__(self, block_manager: BlockManager, limits: SchedulerLimits) -> None:
        self.block_manager = block_manager
        self.block_size = block_size = limits.block_size
        self._prompt_hashes = PromptHashes(block_size)
        self._groups = groups = limits.kv_groups
        self._of_keys = [number for number, group in enumerate(groups) if not group.is_state]
        self._windowed = [number for number in self._of_keys if groups[number].window is not None]
        self._needs_all = all(group.window is None and group.span == 1 for group in groups)
        """Whether a prefix is reused in all groups alike, from its first block to its last."""
        self._unit = math.lcm(*(group.span for group in groups))
        """The columns of a prefix are a multiple of it."""
        by_token = [number for number in self._of_keys if groups[number].span == 1]
        self._states = StateBlocks(
            block_manager, [number for number, group in enumerate(groups) if group.is_state], block_size
        )
        self._segments = SharedSegments(
            {group: groups[group].window for group in by_token},
            token_bytes=[group.token_bytes for group in groups],
            block_size=block_size,
            max_num_seqs=limits.max_num_seqs,
            costs=limits.segment_costs,
        )
        without_window = [number for number in by_token if groups[number].window is None]
        self._chunk_groups = ChunkGroups(
            without_window,
            block_size,
            limits.prefix_costs,
            token_bytes=sum(groups[number].token_bytes for number in without_window),
        )
        may_copy = limits.num_homes == 1 and block_manager.enable_prefix_caching and len(by_token) == len(groups)
        self._key_copies = KeyCopies(block_size, is_on=may_copy)
        self._leaving: dict[RequestState, None] = {}
        """Requests that took blocks for a chunk and no longer need all of them in the next step."""

    @property
    def num_bytes_saved(self) -> int:
        """Bytes of keys and values that steps did not read, because they read them once for several rows."""
        return self._segments.num_bytes_saved + self._chunk_groups.num_bytes_saved

    def begin_step(self) -> None:
        """Begin planning a step: blocks of earlier steps will be filled when it runs."""
        self._states.begin_step()
        self._key_copies.begin_step()
        leaving, self._leaving = self._leaving, {}
        for state in leaving:
            self._free_behind_windows(state)

    def entered(self, state: RequestState) -> None:
        """Record that a request got a slot, with the blocks that `enter` took."""
        self._key_copies.entered(state)

    def decodes(self, state: RequestState) -> None:
        """Record that the steps scheduled so far compute all known tokens of a request."""
        self._segments.enter(state)

    def share(self, draft: StepDraft, num_decodes: int) -> dict[str, Any]:
        """Return the fields of a `StepInput` about keys that its rows share: `num_decodes` decode rows, and the chunks
        of its draft, which are reordered so that chunks that share keys are neighbours."""
        draft.chunks, groups = self._chunk_groups.arrange(draft.chunks)
        return {
            "shared_prefixes": pack(n for first, count, keys in groups for n in (num_decodes + first, count, keys)),
            "key_copies": self._key_copies.packed(),
            "copies_new_keys": self._key_copies.copies_new_keys,
            **self._segments.take_changes(num_decodes),
        }

    def forget_sent(self) -> None:
        """Record that steps did not run, so that the ranks' state is unknown. No request may be running."""
        self._segments.forget_sent()

    def can_fit(self, num_tokens: int) -> bool:
        """Whether a request that runs alone can compute `num_tokens` tokens."""
        if ceil_div(num_tokens, self.block_size) * len(self._groups) <= self.block_manager.num_blocks:
            return True
        needed = sum(group.most_blocks(num_tokens, self.block_size) for group in self._groups)
        return needed <= self.block_manager.num_blocks

    def most_tokens(self, limit: int) -> int:
        """Return the most tokens, below `limit`, that a request that runs alone can compute."""
        return bisect(range(limit), False, key=lambda count: not self.can_fit(count)) - 1

    def reserve(self, num_requests: int) -> int:
        """Return the most blocks that `num_requests` decoding requests need for one more token each: one in each group,
        however many columns its blocks span."""
        return num_requests * len(self._of_keys)

    def enter(self, state: RequestState, budget: int, *, reserve: int) -> int | None:
        """Take a waiting request's first blocks, cached ones first, and set `num_computed` to match, copied keys
        included. A request that kept its blocks (`leave_slot`) goes on with them.

        Groups without a window get blocks for all known tokens, the others for the first chunk. Returns the chunk's
        number of tokens, at most `budget`. Returns None, and takes nothing, if fewer than `reserve` free blocks would
        be left, or if the request needs a state that this very step computes. Returns 0, having taken blocks, if the
        chunk would begin with an image that must not be cut and does not fit.
        """
        if state.blocks:
            return max(0, self._first_chunk(state, budget, reserve)) or None
        block_size, manager = self.block_size, self.block_manager
        num_tokens = state.num_tokens
        most_reusable = self._most_reusable(state)
        num_cached = self._match(state, state.hash_blocks(0, most_reusable // block_size, self._prompt_hashes))
        state.num_computed = num_cached * block_size
        num_columns = ceil_div(num_tokens, block_size)
        counts = [
            1 if self._groups[group].window else self._num_blocks(group, num_columns) - len(state.blocks[group])
            for group in self._of_keys
        ]
        fresh = None
        if not self._states.are_new(self._states.last(state)):
            num_states = self._states.num_missing(state, num_cached + 1)
            fresh = manager.allocate(sum(counts), reserve=reserve + num_states)
        if fresh is None:
            self.release(state)
            return None
        for group, count in zip(self._of_keys, counts, strict=True):
            state.blocks[group] += fresh[:count]
            del fresh[:count]
        state.set_hashed_blocks(num_cached, block_size)
        state.num_computed += self._key_copies.plan(state, num_cached, most_reusable, self._prompt_hashes)
        state.capacity = self._num_columns(state) * block_size
        return self._first_chunk(state, budget, reserve)

    def _first_chunk(self, state: RequestState, budget: int, reserve: int) -> int:
        """Take the blocks that an entering request lacks for its first chunk. Returns the chunk's number of tokens; it
        is not positive if there are too few."""
        length = whole_chunk(state, min(state.num_uncomputed, budget))
        if state.num_computed + length > state.capacity:
            length = whole_chunk(state, self._lengthen(state, length, least=1, reserve=reserve)[0])
        if self._windowed and length > self.block_size:
            self._leaving[state] = None
        return length

    def leave_slot(self, state: RequestState) -> None:
        """Record that a running request gives its slot back and keeps its blocks."""
        assert state.slot is not None
        self._segments.leave(state.slot)
        self._key_copies.drop(state)

    def num_cached_blocks(self, state: RequestState) -> int:
        """Count the leading blocks of a waiting request whose keys of the first group are in the prefix cache."""
        hashes = state.hash_blocks(0, self._most_reusable(state) // self.block_size, self._prompt_hashes)
        return len(self.block_manager.find_leading(hashes))

    def _most_reusable(self, state: RequestState) -> int:
        """Return the most tokens of a waiting request that may come from the prefix cache."""
        # The last token is always computed: its logits are needed.
        most = state.num_tokens - 1 if self.block_manager.enable_prefix_caching else 0
        return most if state.first_unread is None else min(most, state.first_unread)

    def grow(self, state: RequestState, num_tokens: int, draft: StepDraft, *, least: int) -> int:
        """Take blocks for a request's next `num_tokens` tokens, or for fewer if there are too few free blocks.

        Returns the number of tokens that fit. If that is less than `least`, no block is taken.
        """
        if self._windowed:
            self._free_behind_windows(state)
            if num_tokens > self.block_size:
                self._leaving[state] = None
        if self._states.groups:
            self._states.free_old(state)
        num_tokens, taken = self._lengthen(state, num_tokens, least=least)
        for group, first_column, blocks in taken:
            assert state.slot is not None
            draft.add_blocks(group, state.slot, first_column, blocks)
        return num_tokens

    def has_room(self, wanted: Iterable[tuple[RequestState, int]]) -> bool:
        """Whether there are enough free blocks for each request's next tokens, without counting blocks that windows
        will free."""
        columns = [(state, ceil_div(state.num_computed + num_tokens, self.block_size)) for state, num_tokens in wanted]
        return sum(self._num_missing(*pair) for pair in columns) <= self.block_manager.num_free

    def _lengthen(
        self, state: RequestState, num_tokens: int, *, least: int, reserve: int = 0
    ) -> tuple[int, list[tuple[int, int, list[int]]]]:
        """Take blocks as `grow` does, and leave `reserve` free ones.

        Returns the number of tokens that fit, and (group, first column, blocks) of the blocks taken.
        """
        block_size, manager = self.block_size, self.block_manager
        num_columns = ceil_div(state.num_computed + num_tokens, block_size)
        num_free = max(0, manager.num_free - reserve)
        while (num_missing := self._num_missing(state, num_columns)) > num_free:
            num_columns -= 1
            num_tokens = num_columns * block_size - state.num_computed
        if num_tokens < least or num_columns * block_size <= state.capacity:
            return num_tokens, []
        fresh = manager.allocate(num_missing)
        assert fresh is not None
        taken = []
        for group in self._of_keys:
            blocks = state.blocks[group]
            count = self._num_blocks(group, num_columns) - len(blocks)
            if count > 0:
                taken.append((group, len(blocks), fresh[:count]))
                blocks += fresh[:count]
                del fresh[:count]
        if self._states.groups:
            columns = self._states.lengthen(state, num_columns, fresh, room=num_free - num_missing)
            for column, blocks in columns.items():
                taken += [(group, column, [block]) for group, block in zip(self._states.groups, blocks, strict=True)]
        state.capacity = num_columns * block_size
        return num_tokens, taken

    def _num_missing(self, state: RequestState, num_columns: int) -> int:
        """Count the blocks that a request lacks for `num_columns` columns in each group."""
        num_missing = self._states.num_missing(state, num_columns) if self._states.groups else 0
        for group in self._of_keys:
            num_missing += max(0, self._num_blocks(group, num_columns) - len(state.blocks[group]))
        return num_missing

    def _num_blocks(self, group: int, num_columns: int) -> int:
        """Count a KV group's blocks for `num_columns` columns."""
        return ceil_div(num_columns, self._groups[group].span)

    def _num_columns(self, state: RequestState) -> int:
        """Count the columns for which a request has blocks in every group."""
        return min(len(blocks) * group.span for blocks, group in zip(state.blocks, self._groups, strict=True))

    def trim(self, state: RequestState) -> None:
        """Give back the blocks that a request no longer needs after its upper bound was lowered."""
        num_columns = ceil_div(state.num_computed, self.block_size)
        if state.capacity <= num_columns * self.block_size:
            return
        for group in self._of_keys:
            blocks, num_kept = state.blocks[group], self._num_blocks(group, num_columns)
            self.block_manager.release(blocks[num_kept:])
            del blocks[num_kept:]
        self._states.trim(state, num_columns)
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
        hashes = state.hash_blocks(first, num_full, self._prompt_hashes)
        registered: list[int] = []
        for group in self._of_keys:
            span = self._groups[group].span
            begin = max(first // span, state.first_columns[group])
            blocks = state.blocks[group][begin : num_full // span]
            manager.register(blocks, hashes[(begin + 1) * span - 1 - first :: span], group)
            registered += blocks
        if self._states.groups:
            registered += self._states.register(state, first, hashes)
        return registered

    def forget(self, state: RequestState) -> None:
        """Make the blocks of a request's tokens unfindable, whoever filled them."""
        hashes = state.hash_blocks(0, state.num_tokens // self.block_size, self._prompt_hashes)
        groups = range(len(self._groups))
        found = [self.block_manager.find(block_hash, group) for block_hash in hashes for group in groups]
        self.block_manager.unregister(block for block in found if block is not None)

    def forget_prefixes(self) -> None:
        """Make all blocks unfindable; held blocks stay with their holders."""
        self.block_manager.forget_prefixes()
        self._key_copies.forget()
        self._prompt_hashes = PromptHashes(self.block_size)

    def release(self, state: RequestState) -> None:
        """Give all of a request's blocks back. Its tokens are to be computed again."""
        if state.slot is not None:
            self._segments.leave(state.slot)
        self._key_copies.drop(state)
        self._leaving.pop(state, None)
        for group in self._of_keys:
            blocks, first = state.blocks[group], state.first_columns[group]
            self.block_manager.release(blocks[first:] if first else blocks)
        self._states.release(state)
        state.blocks = []
        state.first_columns = []
        state.capacity = state.num_computed = 0
        state.set_hashed_blocks(0, self.block_size)

    def shares_blocks(self, state: RequestState) -> bool:
        """Whether another request also holds a running request's first block of keys."""
        tables = [(state.blocks[group], state.first_columns[group]) for group in self._of_keys]
        firsts = [block for blocks, first in tables for block in blocks[first : first + 1]]
        return not all(map(self.block_manager.has_single_owner, firsts))

    def _match(self, state: RequestState, hashes: Sequence[BlockHash]) -> int:
        """Find the longest cached prefix, and take a reference to its blocks. Returns its columns.

        Sets each group's blocks; blocks outside its window are 0. Also sets `num_found_blocks`.
        """
        state.blocks = [self._find(hashes, group) for group in range(len(self._groups))]
        num_cached = self._num_columns(state)
        if self._needs_all:
            state.num_found_blocks = num_cached
            state.first_columns = [0] * len(state.blocks)
        else:
            num_cached = self._num_whole(state, num_cached)
            state.first_columns = [self._first_column(group, num_cached) for group in range(len(self._groups))]
        for group, (blocks, first) in enumerate(zip(state.blocks, state.first_columns, strict=True)):
            del blocks[self._num_blocks(group, num_cached) :]
            blocks[:first] = [0] * first
            self.block_manager.hold(blocks[first:])
        return num_cached

    def _num_whole(self, state: RequestState, num_cached: int) -> int:
        """Return the length of the longest prefix, up to `num_cached` blocks, for which every group found the blocks
        that it needs. Sets `num_found_blocks`."""
        found = state.blocks
        runs = {group: _run_lengths(found[group]) for group in (*self._windowed, *self._states.groups)}

        def is_whole(group: int, num_blocks: int) -> bool:
            return runs[group][num_blocks] >= num_blocks - self._first_column(group, num_blocks)

        num_cached -= num_cached % self._unit
        while not all(is_whole(group, num_cached) for group in self._windowed):
            num_cached -= self._unit
        state.num_found_blocks = num_cached
        while not all(is_whole(group, num_cached) for group in runs):
            num_cached -= self._unit
        return num_cached

    def _find(self, hashes: Sequence[BlockHash], group: int) -> list[int]:
        """Find the blocks that a group has registered under these hashes. The result ends before the first missing
        block; in a group with a window it has a 0 for each missing one."""
        if self._groups[group].window is None:
            span = self._groups[group].span
            return self.block_manager.find_leading(hashes[span - 1 :: span], group)
        return [self.block_manager.find(block_hash, group) or 0 for block_hash in hashes]

    def _first_column(self, group: int, num_blocks: int) -> int:
        """The first block seen by the token after `num_blocks` full blocks."""
        return self._groups[group].first_column(num_blocks * self.block_size, self.block_size)

    def _free_behind_windows(self, state: RequestState) -> None:
        for number in self._windowed:
            blocks, start = state.blocks[number], state.first_columns[number]
            end = self._groups[number].first_column(state.least_computed, self.block_size)
            if end > start:
                self.block_manager.release(blocks[start:end])
                blocks[start:end] = [0] * (end - start)
                state.first_columns[number] = end

    def check_integrity(self, holders: Sequence[RequestState]) -> None:
        """Assert that the tables of the requests that hold blocks agree with the block manager and with the requests'
        progress."""
        self.block_manager.check_integrity(different(blocks) for state in holders for blocks in state.blocks)
        self._segments.check_integrity(holders)
        for state in holders:
            assert len(state.blocks) == len(state.first_columns) == len(self._groups)
            num_columns = ceil_div(state.num_computed, self.block_size)
            assert state.capacity <= self._num_columns(state) * self.block_size
            assert state.capacity >= state.num_computed
            if state.num_pending or not state.num_uncomputed:
                needed = [self._num_blocks(group, num_columns) for group in range(len(self._groups))]
                assert list(map(len, state.blocks)) == needed, "not the blocks of its upper bound"
            self._states.check_integrity(state)
            for number in self._of_keys:
                blocks, first = state.blocks[number], state.first_columns[number]
                assert not any(blocks[:first])
                assert len(different(blocks)) == len(blocks) - first, "a column without a block, or one in two columns"
                least = self._groups[number].first_column(state.least_computed, self.block_size)
                assert first <= least, "freed inside the window"


def _run_lengths(blocks: Sequence[int]) -> list[int]:
    """For each n from 0, count how many of the last of the first n blocks are present (not 0) without a gap."""
    runs = [0]
    for block in blocks:
        runs.append(runs[-1] + 1 if block else 0)
    return runs
