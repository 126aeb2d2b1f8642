"""StepClock: measures how long a step's work took the device, and how long the device waited for the host.

Events around the steps give the time between two of them. Within a graph the device never waits. Within an eager step
it may wait for every launch, which events around the step do not show. The host can tell that this happened: the device
then finishes as soon as the last launch is made. To learn how long the work alone takes, one such step in a while is
held back behind a spinning kernel until all of its work is launched. A step with late masks (`constraints.py`) makes
the device wait for them within its work, and this counts as the device's time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

_HELD_EVERY = 128
"""One in this many eager steps that waited for launches is held back to be timed."""
_HOLD_MARGIN = 1.5
_CYCLES_PER_SECOND = 2.0e9
"""An upper bound on GPU clocks; the spinning kernel counts cycles."""
_LAUNCH_BOUND = 0.1
"""A step was waiting for launches if, after the last one, the device finished within this share of the launching
time."""
_UNDISTURBED = 2.0
"""Launching that took more than this multiple of the fastest was itself held up: the device's queue was full, or a
kernel was being loaded. The device did not wait during that time."""


class StepTime:
    """One step's times; complete after `wait`."""

    seconds = 0.0
    """The device's time for the step, without the time it waited."""
    idle_seconds = 0.0
    """The time that the device waited for the host, before the step and in it."""

    def wait(self) -> None:
        """Wait until the device has finished the step."""


@dataclass(slots=True)
class _Launches:
    """Measurements of eager steps. The thread that posts outputs makes them; the rank's main thread uses them to decide
    which steps to hold back."""

    busy_per_token: float = 0.0
    """Seconds per token, from the last step that was held back; 0 before the first."""
    seconds: float = 0.0
    """Seconds that the host took to launch the last step that waited for it; 0 before the first."""
    fastest: float = math.inf
    """The fewest seconds that launching a step took."""
    until_hold: int = 0
    """Steps that still wait for launches before one is held back again."""


class _HostTime(StepTime):
    started = ended = 0.0


class _DeviceTime(StepTime):
    def __init__(self, previous_end: torch.cuda.Event | None, launches: _Launches | None, num_tokens: int) -> None:
        """`launches`: given for eager steps, to find out how long they wait for launches."""
        self.started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.launch_started = self.launch_ended = 0.0
        self.is_held = False
        self._previous_end = previous_end
        self._launches = launches
        self._num_tokens = num_tokens

    def wait(self) -> None:
        self.ended.synchronize()
        behind = time.perf_counter() - self.launch_ended
        self.seconds = self.started.elapsed_time(self.ended) / 1e3
        if self._previous_end is not None and not self.is_held:
            self.idle_seconds = max(0.0, self._previous_end.elapsed_time(self.started) / 1e3)
        if self._launches is not None:
            self._look_into_launches(self._launches, behind)

    def _look_into_launches(self, launches: _Launches, behind: float) -> None:
        if self.is_held:
            launches.busy_per_token = self.seconds / self._num_tokens
            return
        launch_seconds = self.launch_ended - self.launch_started
        launches.fastest = min(launches.fastest, launch_seconds)
        if behind < _LAUNCH_BOUND * launch_seconds and launch_seconds < _UNDISTURBED * launches.fastest:
            launches.seconds = launch_seconds
            launches.until_hold -= 1
            if launches.busy_per_token:
                waited = max(0.0, self.seconds - launches.busy_per_token * self._num_tokens)
                self.seconds -= waited
                self.idle_seconds += waited


class StepClock:
    """Times the steps of one stream, one after another."""

    def __init__(self, device: torch.device, *, looks_into_steps: bool = False) -> None:
        """`looks_into_steps`: find out how long eager steps wait for launches, which costs a little time; for
        benchmarks."""
        self._on_gpu = device.type == "cuda"
        self._launches = _Launches() if looks_into_steps else None
        self._last: StepTime | None = None

    def start(self, *, is_graph: bool, num_tokens: int) -> StepTime:
        """Call before the first launch of a step, after the host has planned it."""
        if self._on_gpu:
            last, launches = self._last, None if is_graph else self._launches
            device_time = _DeviceTime(last.ended if isinstance(last, _DeviceTime) else None, launches, num_tokens)
            if launches is not None and launches.seconds and launches.until_hold <= 0:
                launches.until_hold = _HELD_EVERY
                device_time.is_held = True
                torch.cuda._sleep(int(_HOLD_MARGIN * launches.seconds * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            device_time.launch_started = time.perf_counter()
            device_time.started.record()
            return device_time
        host_time = _HostTime()
        host_time.started = time.perf_counter()
        if isinstance(self._last, _HostTime):
            host_time.idle_seconds = host_time.started - self._last.ended
        return host_time

    def stop(self, step: StepTime) -> None:
        """Call after the last launch of the step."""
        self._last = step
        if isinstance(step, _DeviceTime):
            step.ended.record()
            step.launch_ended = time.perf_counter()
        elif isinstance(step, _HostTime):
            step.ended = time.perf_counter()
            step.seconds = step.ended - step.started
