"""EngineCore: the loop of one replica. Schedules a step while the one before it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from nvcli.engine.request import EngineStats, Request, RequestOutput, StepRecord
from nvcli.engine.scheduler import ScheduledStep, Scheduler
from nvcli.messages import StepInput, StepOutput

if TYPE_CHECKING:
    from nvcli.engine.step_recorder import StepRecorder

MAX_STEPS_IN_FLIGHT = 2
"""One that runs and one that waits behind it, so that the device goes from step to step without waiting for us.

Executors and runners are made for so many, and no more."""


class StepExecutor(Protocol):
    """What the loop needs of an executor."""

    def submit(self, step: StepInput) -> None: ...

    def collect(self) -> StepOutput: ...


class EngineCore:
    """Requests in, outputs out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        recorder: StepRecorder | None = None,
        overlap: bool = True,
    ) -> None:
        """`overlap` False: a step is scheduled when the one before it is done, to show what overlap is worth."""
        self._scheduler = scheduler
        self._executor = executor
        self._recorder = recorder
        self._max_in_flight = MAX_STEPS_IN_FLIGHT if overlap else 1
        self._in_flight: deque[ScheduledStep] = deque()

    def add(self, requests: Iterable[Request]) -> None:
        self._scheduler.add(requests)

    def abort(self, request_ids: Iterable[int]) -> None:
        self._scheduler.abort(request_ids)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._scheduler.block_manager.forget_prefixes()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_unfinished

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    def take_records(self) -> list[StepRecord]:
        """Of the steps since the last call; empty unless they are recorded."""
        return self._recorder.take() if self._recorder is not None else []

    def step(self) -> list[RequestOutput]:
        """Submit the next step, then take in the oldest one's output.

        When nothing can be scheduled, what is in flight is collected.
        """
        step = self._scheduler.schedule()
        if step is not None:
            self._executor.submit(step.input)
            self._in_flight.append(step)
            if self._recorder is not None:
                self._recorder.submitted(step.input, num_used_blocks=self._scheduler.block_manager.num_used)
        if self._in_flight and (step is None or len(self._in_flight) == self._max_in_flight):
            oldest = self._in_flight.popleft()
            output = self._executor.collect()
            if self._recorder is not None:
                self._recorder.collected(output)
            self._scheduler.process(oldest, output)
        return self._scheduler.take_outputs()
