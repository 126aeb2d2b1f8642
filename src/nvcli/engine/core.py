"""EngineCore: the loop of one replica. It schedules a step while earlier ones run.

A step that runs out of memory does not end the run: the steps in flight are taken back, the limits are lowered for the
rest of the run, and the requests are recomputed. Ranks that cannot go on are restarted first.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from nvcli.core.messages import StepInput, StepOutput
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.request import RequestOutput, StepRecord
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.step_draft import ScheduledStep
from nvcli.errors import CapacityError, LimitsTooHigh

if TYPE_CHECKING:
    from nvcli.engine.step_recorder import StepRecorder


class StepExecutor(Protocol):
    """The part of an executor that the loop uses."""

    def submit(self, step: StepInput) -> None:
        """Send a step to the ranks."""

    def collect(self) -> StepOutput:
        """Wait for the output of the oldest submitted step, and return it."""

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        """Go on with these limits after a step ran out of memory; no step may be in flight.

        Returns the number of KV blocks if their contents are lost, or None if nothing was lost. Raises LimitsTooHigh if
        lower limits may be tried.
        """

    def change_weights(self, change: WeightsChange) -> WeightsChanged:
        """Change the weights on all ranks, and wait for it; no step may be in flight."""


class EngineCore:
    """The engine without its process: `scheduler` takes requests, and each step returns outputs."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        max_in_flight: int,
        recorder: StepRecorder | None = None,
    ) -> None:
        """`max_in_flight`: steps submitted before the oldest one's output is waited for
        (`EngineConfig.max_steps_in_flight`)."""
        self.scheduler = scheduler
        self._executor = executor
        self._recorder = recorder
        self._max_in_flight = max_in_flight
        self._in_flight: deque[ScheduledStep] = deque()
        self.notes: list[str] = []
        """Warnings for the user, not yet returned by `take_notes`."""

    def change_weights(self, change: WeightsChange) -> tuple[list[RequestOutput], WeightsChanged]:
        """Finish all requests, change the weights of all ranks, or their memory, and forget what was computed with
        them. Returns the outputs of these requests and the answer to the change."""
        outputs: list[RequestOutput] = []
        while self.has_work:
            outputs += self.step()
        changed = self._executor.change_weights(change)
        if not changed.error_kind:
            self.scheduler.forget_prefixes()
        return outputs, changed

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_unfinished

    def take_records(self) -> list[StepRecord]:
        """Return the records of the steps since the last call; there are none unless steps are recorded."""
        return self._recorder.take() if self._recorder is not None else []

    def take_notes(self) -> list[str]:
        """Return the warnings for the user since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def step(self) -> list[RequestOutput]:
        """Submit the next step, then take in the oldest one's output.

        If nothing can be scheduled, only collect what is in flight. Raises CapacityError if even the smallest step runs
        out of memory, and ModelError if the model gives no finite logits.
        """
        step = self.scheduler.schedule()
        if step is not None:
            self._executor.submit(step.input)
            self._in_flight.append(step)
            if self._recorder is not None:
                self._recorder.submitted(step.input, num_used_blocks=self.scheduler.num_used_blocks)
        if self._in_flight and (step is None or len(self._in_flight) == self._max_in_flight):
            oldest = self._in_flight.popleft()
            output = self._executor.collect()
            if output.out_of_memory:
                self._recover(oldest, output.out_of_memory)
                return self.scheduler.take_outputs()
            if self._recorder is not None:
                self._recorder.collected(output)
            if output.note:
                self.notes.append(output.note)
            self.scheduler.process(oldest, output)
        return self.scheduler.take_outputs()

    def _recover(self, failed: ScheduledStep, reason: str) -> None:
        """Take back a step that ran out of memory, and the later ones, which the ranks skipped."""
        for _ in self._in_flight:
            output = self._executor.collect()
            assert output.out_of_memory, "a step ran that builds on one that did not"
        self.scheduler.put_back([failed, *self._in_flight])
        self._in_flight.clear()
        if self._recorder is not None:
            self._recorder.dropped()
        started_at = time.monotonic()
        num_blocks = self._lower_limits(reason)
        limits = self.scheduler.limits
        restart = ""
        if num_blocks is not None:
            self.scheduler.start_anew(num_blocks)
            restart = f". Restarting all ranks took {time.monotonic() - started_at:.1f} s"
        self.notes.append(
            f"warning: out of memory in step {failed.input.step_id} with {failed.input.num_rows:,} requests and "
            f"{failed.input.total_tokens:,} tokens ({reason}). They are recomputed, from now on with "
            f"max_num_batched_tokens {limits.max_num_batched_tokens:,} and max_num_seqs {limits.max_num_seqs:,}"
            f"{restart}"
        )

    def _lower_limits(self, reason: str) -> int | None:
        """Lower the limits until the ranks can go on with them; return what `StepExecutor.recover` returns."""
        while self.scheduler.lower_limits():
            limits = self.scheduler.limits
            with contextlib.suppress(LimitsTooHigh):  # other programs have taken memory meanwhile
                return self._executor.recover(
                    max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
                )
        raise CapacityError(
            f"out of memory even with a single token per step ({reason}): lower gpu_memory_utilization (or "
            "kv_cache_memory), so that the KV cache leaves more room, or end other programs that use this memory"
        )
