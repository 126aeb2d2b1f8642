"""StepRecorder: records for benchmarks what each step computed and how long the device took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from nvcli.core.messages import KVGroup, StepInput, StepOutput
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import StepRecord

_Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


class RepeatedBlocks:
    """Counts the KV blocks that the rows of a step attend to more than once, because requests share a prefix.

    It tracks the block tables as the ranks do, from each step's changes, so that benchmarks can tell how much a step
    would read if each shared block were read once. It counts blocks of the first KV group without a window; in a model
    that has no such group nothing counts as repeated.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._group = next((number for number, group in enumerate(groups) if group.window is None), None)
        # The arrays grow with the slots, columns and blocks that appear.
        self._tables = np.zeros((0, 0), dtype=np.int32)
        """[slots, columns], the block of each column, or 0."""
        self._decoding = np.zeros(0, dtype=np.bool_)
        """[slots], whether the slot is a decode row of the latest step."""
        self._holders = np.zeros(0, dtype=np.int32)
        """[blocks], the decode rows that hold each block."""
        self._num_held = 0
        """The sum of `_holders`."""
        self._packed_slots = b""
        """The packed slots of the latest step's decode rows, to recognise an equal set."""
        self.num_among_decode_rows = 0
        """Blocks that decode rows of the latest step need not read again."""

    def take(self, step: StepInput) -> None:
        """Apply the next step: its changes of the block tables, and its decode rows."""
        if step.freed_slots:
            freed = _unpack(step.freed_slots)
            self._grow(freed)
            leaving = freed[self._decoding[freed]]
            self._hold(self._tables[leaving], -1)
            self._decoding[leaving] = False
            self._tables[freed] = 0
        if step.block_ids:
            is_counted = _unpack(step.block_groups) == (-1 if self._group is None else self._group)
            entries = (step.block_slots, step.block_columns, step.block_ids)
            self._set(*(_unpack(packed)[is_counted] for packed in entries))
        packed_slots = step.slots[: 4 * step.num_decodes]
        if packed_slots != self._packed_slots or np.count_nonzero(self._decoding) < step.num_decodes:
            self._packed_slots = packed_slots
            slots = _unpack(packed_slots)
            self._grow(slots)
            decoding = np.zeros_like(self._decoding)
            decoding[slots] = True
            self._hold(self._tables[self._decoding & ~decoding], -1)
            self._hold(self._tables[decoding & ~self._decoding], 1)
            self._decoding = decoding

    def num_among_chunks(self, step: StepInput) -> int:
        """Return the number of blocks that the prefill chunks of the latest step need not read again."""
        slots = _unpack(step.slots)[step.num_decodes :]
        self._grow(slots)
        tables = self._tables[slots]
        blocks = tables[tables > 0]
        return len(blocks) - int(np.count_nonzero(np.bincount(blocks)))

    def _set(self, slots: _Ints, columns: _Ints, blocks: _Ints) -> None:
        """Set the blocks of these slots and columns."""
        self._grow(slots, columns)
        is_held = self._decoding[slots]
        self._hold(self._tables[slots[is_held], columns[is_held]], -1)
        self._hold(blocks[is_held], 1)
        self._tables[slots, columns] = blocks

    def _hold(self, blocks: np.ndarray, change: int) -> None:
        """Count decode rows that hold these blocks once more (`change` 1) or once less (-1); 0 is not a block."""
        blocks = blocks[blocks > 0]
        if len(blocks) == 0:
            return
        if (most := int(blocks.max())) >= len(self._holders):
            self._holders = _enlarged(self._holders, most + 1)
        np.add.at(self._holders, blocks, change)
        self._num_held += change * len(blocks)
        self.num_among_decode_rows = self._num_held - int(np.count_nonzero(self._holders))

    def _grow(self, slots: _Ints, columns: _Ints | None = None) -> None:
        """Make room for these slots and columns in the tables."""
        num_slots, num_columns = self._tables.shape
        least_slots = max(num_slots, int(slots.max(initial=-1)) + 1)
        least_columns = num_columns if columns is None else max(num_columns, int(columns.max(initial=-1)) + 1)
        if (least_slots, least_columns) != (num_slots, num_columns):
            self._tables = _enlarged(self._tables, least_slots, least_columns)
            self._decoding = _enlarged(self._decoding, least_slots)


def _unpack(packed: bytes) -> _Ints:
    return np.frombuffer(packed, dtype=np.int32)


def _enlarged(array: np.ndarray, *least: int) -> np.ndarray:
    """Return an array with the same entries, zero-padded to at least this shape."""
    shape = [old if new <= old else max(new, 2 * old) for old, new in zip(array.shape, least, strict=True)]
    larger = np.zeros(shape, dtype=array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger


class StepRecorder:
    """Counts what the rows of each step compute. Lengths are as the engine knows them when it schedules the step: upper
    bounds if steps may give fewer tokens than they compute logits for, else exact."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self._kv_groups = limits.kv_groups if limits.num_homes == 1 else ()  # else equal ids are different blocks
        self._repeated = RepeatedBlocks(self._kv_groups)
        self._in_flight: deque[StepRecord] = deque()
        self._records: list[StepRecord] = []

    def submitted(self, step: StepInput, *, num_used_blocks: int) -> None:
        """Record a step that was submitted while running requests held `num_used_blocks`."""
        num_tokens, num_logits, lens = (
            np.frombuffer(packed, dtype=np.int32).astype(np.int64)
            for packed in (step.num_tokens, step.num_logits, step.seq_lens)
        )
        self._repeated.take(step)
        chunk_lens, ends = num_tokens[step.num_decodes :], lens[step.num_decodes :]
        starts = ends - chunk_lens
        self._in_flight.append(
            StepRecord(
                mode=step.mode,
                num_decodes=step.num_decodes,
                num_prefill_tokens=int(chunk_lens.sum()),
                num_sampled=step.draft_tokens or int(num_logits.sum()),
                decode_keys=int(lens[: step.num_decodes].sum()),
                prefill_keys=int(ends.sum()),
                prefill_pairs=int((ends * (ends + 1) - starts * (starts + 1)).sum()) // 2,
                repeated_decode_keys=self._repeated.num_among_decode_rows * self._block_size,
                repeated_prefill_keys=self._repeated.num_among_chunks(step) * self._block_size,
                num_chunks=len(chunk_lens),
                num_used_blocks=num_used_blocks,
            )
        )

    def collected(self, output: StepOutput) -> None:
        """Complete the record of the oldest submitted step with its output."""
        record = self._in_flight.popleft()
        record.seconds, record.idle_seconds, record.is_graph = output.seconds, output.idle_seconds, output.is_graph
        self._records.append(record)

    def dropped(self) -> None:
        """Forget the submitted steps, which did not run, and the blocks of all slots: requests enter slots again."""
        self._in_flight.clear()
        self._repeated = RepeatedBlocks(self._kv_groups)

    def take(self) -> list[StepRecord]:
        """Return the records of the steps that were collected since the last call."""
        records, self._records = self._records, []
        return records
