"""StepRecorder: what each step computed, and how long the device took for it. For benchmarks."""

from __future__ import annotations

from collections import deque

import numpy as np

from nvcli.engine.request import StepRecord
from nvcli.messages import StepInput, StepOutput


class StepRecorder:
    """Follows the lengths of the slots from step to step, as the ranks do."""

    def __init__(self, max_num_seqs: int) -> None:
        self._lens = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens in each slot whose keys and values are computed."""
        self._in_flight: deque[StepRecord] = deque()
        self._records: list[StepRecord] = []

    def submitted(self, step: StepInput, *, num_used_blocks: int) -> None:
        decode_slots, extend_slots, extend_lens, samples = (
            np.frombuffer(packed, dtype=np.int32)
            for packed in (step.decode_slots, step.extend_slots, step.extend_lens, step.extend_samples)
        )
        for new in step.new_slots:
            self._lens[new.slot] = new.num_cached_tokens
        self._lens[decode_slots] += 1
        self._lens[extend_slots] += extend_lens
        ends = self._lens[extend_slots]
        starts = ends - extend_lens
        self._in_flight.append(
            StepRecord(
                mode=step.mode,
                num_decodes=len(decode_slots),
                num_extend_tokens=int(extend_lens.sum()),
                num_sampled=len(decode_slots) + int(samples.sum()),
                decode_keys=int(self._lens[decode_slots].sum()),
                extend_keys=int(ends.sum()),
                extend_pairs=int((ends * (ends + 1) - starts * (starts + 1)).sum()) // 2,
                num_used_blocks=num_used_blocks,
            )
        )

    def collected(self, output: StepOutput) -> None:
        """The oldest submitted step is done."""
        record = self._in_flight.popleft()
        record.seconds, record.idle_seconds = output.seconds, output.idle_seconds
        self._records.append(record)

    def dropped(self) -> None:
        """The submitted steps did not run."""
        self._in_flight.clear()

    def take(self) -> list[StepRecord]:
        """Of the steps since the last call."""
        records, self._records = self._records, []
        return records
