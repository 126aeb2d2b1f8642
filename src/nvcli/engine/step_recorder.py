"""StepRecorder: it records, for benchmarks, what each step computed and how long the device took for it."""

from __future__ import annotations

from collections import deque

import numpy as np

from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.repeated_blocks import RepeatedBlocks
from nvcli.engine.request import StepRecord
from nvcli.messages import StepInput, StepOutput


class StepRecorder:
    """Counts what the rows of each step compute. Lengths are as the engine knows them when it schedules the step: upper
    bounds where steps may give fewer tokens than they compute logits for, else exact."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self._kv_groups = limits.kv_groups
        self._repeated = RepeatedBlocks(self._kv_groups)
        self._in_flight: deque[StepRecord] = deque()
        self._records: list[StepRecord] = []

    def submitted(self, step: StepInput, *, num_used_blocks: int) -> None:
        """Note a step that was submitted while running requests held `num_used_blocks`."""
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
                num_sampled=int(num_logits.sum()),
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
        """Forget the submitted steps, which did not run, and the blocks of all slots: requests enter slots anew."""
        self._in_flight.clear()
        self._repeated = RepeatedBlocks(self._kv_groups)

    def take(self) -> list[StepRecord]:
        """Return the records of the steps that were collected since the last call."""
        records, self._records = self._records, []
        return records
