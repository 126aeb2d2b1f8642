"""StepRecorder: records for benchmarks what each step computed and how long the device took."""

from __future__ import annotations

from collections import deque

import numpy as np

from nvcli.core.messages import StepInput, StepOutput
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import StepRecord

_Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


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
    bounds if steps may give fewer tokens than they compute logits for, else exact.

    It tracks the block tables as the ranks do, from each step's changes, so that benchmarks can tell how much a step
    would read if each block that several rows share were read once. It counts blocks of the first KV group without a
    window; in a model that has no such group nothing counts as repeated.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        groups = limits.kv_groups if limits.num_homes == 1 else ()  # else equal ids are different blocks
        full = (number for number, group in enumerate(groups) if group.window is None and group.span == 1)
        self._group = next(full, -1)
        self._tables = np.zeros((0, 0), dtype=np.int32)
        """[slots, columns], the block of each column, or 0. It grows with the slots and columns that appear."""
        self._in_flight: deque[StepRecord] = deque()
        self._records: list[StepRecord] = []

    def submitted(self, step: StepInput, *, num_used_blocks: int) -> None:
        """Record a step that was submitted while running requests held `num_used_blocks`."""
        num_tokens, num_logits, lens = (
            np.frombuffer(packed, dtype=np.int32).astype(np.int64)
            for packed in (step.num_tokens, step.num_logits, step.seq_lens)
        )
        self._update_tables(step)
        slots = _unpack(step.slots)
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
                repeated_decode_keys=self._num_repeated(slots[: step.num_decodes]) * self._block_size,
                repeated_prefill_keys=self._num_repeated(slots[step.num_decodes :]) * self._block_size,
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
        self._tables[:] = 0

    def take(self) -> list[StepRecord]:
        """Return the records of the steps that were collected since the last call."""
        records, self._records = self._records, []
        return records

    def _update_tables(self, step: StepInput) -> None:
        """Apply a step's changes of the block tables."""
        freed, slots, columns = (_unpack(packed) for packed in (step.freed_slots, step.block_slots, step.block_columns))
        rows = np.concatenate([freed, slots, _unpack(step.slots)])
        num_slots, num_columns = (1 + int(numbers.max(initial=-1)) for numbers in (rows, columns))
        if num_slots > self._tables.shape[0] or num_columns > self._tables.shape[1]:
            self._tables = _enlarged(self._tables, num_slots, num_columns)
        self._tables[freed] = 0
        is_counted = _unpack(step.block_groups) == self._group
        self._tables[slots[is_counted], columns[is_counted]] = _unpack(step.block_ids)[is_counted]

    def _num_repeated(self, slots: _Ints) -> int:
        """Return the number of blocks that rows of these slots need not read again."""
        tables = self._tables[slots]
        blocks = tables[tables > 0]
        return len(blocks) - int(np.count_nonzero(np.bincount(blocks)))
