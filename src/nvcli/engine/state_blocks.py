"""StateBlocks: the blocks with recurrent states in the tables of requests.

A state is as large as the keys of a whole block, so a request keeps one block for each group of states: that of the
column in which its last step ended; other columns have none (0). When its next tokens begin a column, the block moves
along and appears in both columns, unless it is registered for reuse and there is room to keep it. A row with drafts may
end in any column from the one that it begins in to that of its last draft, so one block appears in all of these.

Some states of a prompt are kept as long as nothing else needs the room: those after each of its chunks (at the end of
the column), after its last full block, and after the last block whose keys were found without a state, where prompts
with a common prefix diverge (SGLang calls these branching points). States within an answer are not kept.

Rows of one step run side by side, and a state is read before it is written. So no row may start from a state that
another row of its step writes: its request waits for the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nvcli.engine.block_manager import BlockHash, BlockManager
from nvcli.engine.state import RequestState

Columns = dict[int, list[int]]
"""Column → the block of each group of states."""


class StateBlocks:
    """Takes and gives back blocks for the states of requests, in all groups of states alike."""

    def __init__(self, block_manager: BlockManager, groups: Sequence[int], block_size: int) -> None:
        """`groups`: the numbers of the KV groups with states, possibly none."""
        self.groups = tuple(groups)
        self._manager = block_manager
        self._block_size = block_size
        self._new: set[int] = set()
        """Blocks registered since planning of the current step began."""
        self._grown: dict[RequestState, None] = {}
        """Requests that may hold states that they no longer need once the planned steps have run."""

    def begin_step(self) -> None:
        """Begin planning a step: blocks of earlier steps will be filled when it runs."""
        self._new.clear()
        for state in list(self._grown):
            self.free_old(state)
            # The others continue from their last one as soon as a token comes back.
            if state.first_columns[self.groups[0]] >= len(state.blocks[self.groups[0]]) - 1:
                del self._grown[state]

    def last(self, state: RequestState) -> list[int]:
        """Return each group's last block; empty if a request's tables are empty."""
        return [state.blocks[group][-1] for group in self.groups if state.blocks[group]]

    def are_new(self, blocks: Iterable[int]) -> bool:
        """Whether the step being planned writes any of these states."""
        return not self._new.isdisjoint(blocks)

    def num_missing(self, state: RequestState, num_columns: int) -> int:
        """Count the blocks that a request lacks in the last of `num_columns` columns; 0 if its last blocks may move
        along, because all tokens of their column are computed, or are still to be sampled, and no other request starts
        from them."""
        last = self.last(state)
        length = len(state.blocks[self.groups[0]]) if last else 0
        if length >= num_columns:
            return 0
        goes_along = last and (state.num_computed == length * self._block_size or _is_decoding(state))
        return 0 if goes_along and all(map(self._manager.has_single_owner, last)) else len(self.groups)

    def lengthen(self, state: RequestState, num_columns: int, fresh: list[int], *, room: int) -> Columns:
        """Give a request blocks in the last of `num_columns` columns, and in those worth keeping as far as `room` more
        blocks allow.

        `fresh` are blocks for the former; empty if the request's last ones move along. Returns what was added.
        """
        manager, groups = self._manager, self.groups
        first = len(state.blocks[groups[0]])
        if not fresh:
            fresh = self.last(state)
            if any(map(manager.is_registered, fresh)) and room >= len(groups):
                fresh, room = self._allocate(), room - len(groups)
            else:
                manager.unregister(fresh)
        columns = dict.fromkeys(range(first if _is_decoding(state) else num_columns - 1, num_columns), fresh)
        for column in self._worth_keeping(state):
            if first <= column < num_columns - 1 and column not in columns and room >= len(groups):
                columns[column], room = self._allocate(), room - len(groups)
        if not _is_decoding(state):  # drafts may have had blocks there: ranks still know these
            begin = max(first, state.num_prompt // self._block_size)
            columns = dict.fromkeys(range(begin, num_columns), [0] * len(groups)) | columns
        for number, group in enumerate(groups):
            state.blocks[group] += [0] * (num_columns - first)
            for column, blocks in columns.items():
                state.blocks[group][column] = blocks[number]
        self._grown[state] = None
        return columns

    def register(self, state: RequestState, first: int, hashes: Sequence[BlockHash]) -> list[int]:
        """Register for reuse, and return, a request's blocks in the columns from `first` on, with these hashes, as far
        as they hold only its prompt."""
        registered = []
        end = min(first + len(hashes), state.num_prompt // self._block_size)
        for group in self.groups:
            columns = [column for column in range(first, end) if state.blocks[group][column]]
            blocks = [state.blocks[group][column] for column in columns]
            self._manager.register(blocks, [hashes[column - first] for column in columns], group)
            registered += blocks
        self._new.update(registered)
        return registered

    def trim(self, state: RequestState, num_columns: int) -> None:
        """Cut a request's tables to `num_columns` columns, of which the last one's block appears in the others, too."""
        for group in self.groups:
            blocks = state.blocks[group]
            cut = different(blocks[num_columns:])
            del blocks[num_columns:]
            self._manager.release([block for block in cut if block not in blocks])

    def free_old(self, state: RequestState) -> None:
        """Free the states that no future step starts from."""
        end = max(0, state.least_computed - 1) // self._block_size
        for group in self.groups:
            blocks, start = state.blocks[group], state.first_columns[group]
            if end > start:
                kept = blocks[end:]
                self._manager.release([block for block in different(blocks[start:end]) if block not in kept])
                blocks[start:end] = [0] * (end - start)
                state.first_columns[group] = end

    def release(self, state: RequestState) -> None:
        """Give all of a request's states back."""
        self._grown.pop(state, None)
        for group in self.groups:
            self._manager.release(different(state.blocks[group]))

    def _allocate(self) -> list[int]:
        blocks = self._manager.allocate(len(self.groups))
        assert blocks is not None, "there was room"
        return blocks

    def _worth_keeping(self, state: RequestState) -> Iterator[int]:
        """Yield the columns of a prompt from whose states others may start, besides those in which its chunks end."""
        if self._manager.enable_prefix_caching:
            last = (state.num_prompt - 1) // self._block_size - 1
            yield last
            yield min(state.num_found_blocks - 1, last)

    def check_integrity(self, state: RequestState) -> None:
        """Assert that a request has the states that it starts from."""
        for group in self.groups:
            assert state.first_columns[group] <= max(0, state.least_computed - 1) // self._block_size, "freed too early"
            assert state.blocks[group][max(0, state.num_computed - 1) // self._block_size], "nothing to go on from"


def _is_decoding(state: RequestState) -> bool:
    """Whether no more than a request's last known token is left to compute."""
    return state.num_computed >= state.num_tokens - 1


def different(blocks: Iterable[int]) -> list[int]:
    """Return the distinct blocks, without 0."""
    return list(dict.fromkeys(filter(None, blocks)))
