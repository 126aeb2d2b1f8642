"""StepClock: when a step began and ended on its device, without waiting for it."""

from __future__ import annotations

import time

import torch


class StepTime:
    """One step's times; complete after `wait`."""

    seconds = 0.0
    idle_seconds = 0.0

    def wait(self) -> None:
        """Until the device is done with the step."""


class _HostTime(StepTime):
    started = 0.0
    ended = 0.0


class _DeviceTime(StepTime):
    def __init__(self, previous_end: torch.cuda.Event | None) -> None:
        self.started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._previous_end = previous_end

    def wait(self) -> None:
        self.ended.synchronize()
        self.seconds = self.started.elapsed_time(self.ended) / 1e3
        if self._previous_end is not None:
            self.idle_seconds = self._previous_end.elapsed_time(self.started) / 1e3


class StepClock:
    """Times the steps of one stream, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last: StepTime | None = None

    def start(self) -> StepTime:
        """Before the first thing that a step launches."""
        if self._on_gpu:
            last = self._last
            device_time = _DeviceTime(last.ended if isinstance(last, _DeviceTime) else None)
            device_time.started.record()
            return device_time
        host_time = _HostTime()
        host_time.started = time.perf_counter()
        if isinstance(self._last, _HostTime):
            host_time.idle_seconds = host_time.started - self._last.ended
        return host_time

    def stop(self, step: StepTime) -> None:
        """Behind the last thing that the step launches."""
        self._last = step
        if isinstance(step, _DeviceTime):
            step.ended.record()
        elif isinstance(step, _HostTime):
            step.ended = time.perf_counter()
            step.seconds = step.ended - step.started
