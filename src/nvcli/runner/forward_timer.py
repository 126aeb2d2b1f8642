"""ForwardTimer: how long the device takes for a forward pass, measured in the steps whose rows wait for masks."""

from __future__ import annotations

import time
from collections import deque

import torch


class ForwardTimer:
    """Times the forward passes of one stream. Nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started = 0.0
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Around each forward pass that the device was not through with when they were looked at last."""

    def start(self) -> None:
        """Call it before the first thing that a forward pass launches."""
        if self._on_gpu:
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append(events)  # type: ignore[arg-type]
            events[0].record()
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Call it behind the last thing that the forward pass launches."""
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float:
        """Return the time that the last forward pass took that is over; 0 before the first."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            started, ended = self._events.popleft()
            self._seconds = started.elapsed_time(ended) / 1e3
        return self._seconds
