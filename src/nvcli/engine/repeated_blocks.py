"""RepeatedBlocks: how many KV blocks the rows of a step attend to more than once, because requests share a prefix.

It follows the block tables as the ranks do, from what each step says of them, so that benchmarks can tell how much a
step would have to read if each shared block were read once. It counts blocks of the first KV group without a window;
in a model that has no such group nothing counts as repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nvcli.engine.block_tables import KVGroup
from nvcli.messages import StepInput, unpack


class RepeatedBlocks:
    """The blocks of each slot, and how many of a step's decode rows hold each block."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._group = next((number for number, group in enumerate(groups) if group.window is None), None)
        self._tables: dict[int, dict[int, int]] = {}
        """By slot, the block of each column."""
        self._packed_slots = b""
        """The slots of the latest step's decode rows, as the step has them; the next is the same as a set."""
        self._decoding: set[int] = set()
        self._holders: Counter[int] = Counter()
        """By block, the decode rows that hold it."""
        self.num_among_decode_rows = 0
        """The blocks that the decode rows of the latest step need not read again."""

    def take(self, step: StepInput) -> None:
        """Take in the next step: what it changes in the block tables, and its decode rows."""
        for slot in unpack(step.freed_slots):
            self._change_rows(leaving={slot} & self._decoding, entering=set())
            self._tables.pop(slot, None)
        entries = map(unpack, (step.block_groups, step.block_slots, step.block_columns, step.block_ids))
        for group, slot, column, block in zip(*entries, strict=True):
            if group == self._group:
                self._set(slot, column, block)
        packed_slots = step.slots[: 4 * step.num_decodes]
        if packed_slots != self._packed_slots or len(self._decoding) < step.num_decodes:
            self._packed_slots = packed_slots
            slots = set(unpack(packed_slots))
            self._change_rows(leaving=self._decoding - slots, entering=slots - self._decoding)

    def num_among_chunks(self, step: StepInput) -> int:
        """Return the number of blocks that the prefill chunks of the latest step need not read again."""
        tables = [self._tables.get(slot, {}) for slot in unpack(step.slots)[step.num_decodes :]]
        different = {block for table in tables for block in table.values()}
        return sum(map(len, tables)) - len(different)

    def _change_rows(self, *, leaving: set[int], entering: set[int]) -> None:
        for slot in leaving:
            for block in self._tables.get(slot, {}).values():
                self._release(block)
        for slot in entering:
            for block in self._tables.get(slot, {}).values():
                self._hold(block)
        self._decoding -= leaving
        self._decoding |= entering

    def _set(self, slot: int, column: int, block: int) -> None:
        table = self._tables.setdefault(slot, {})
        if slot in self._decoding:
            if column in table:
                self._release(table[column])
            self._hold(block)
        table[column] = block

    def _hold(self, block: int) -> None:
        self.num_among_decode_rows += self._holders[block] > 0
        self._holders[block] += 1

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            self.num_among_decode_rows -= 1
        else:
            del self._holders[block]
