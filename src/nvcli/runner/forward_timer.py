"""ForwardTimer: how long the device takes for a forward pass, measured in the steps whose rows wait for masks."""

from __future__ import annotations

import time
from collections import deque

import torch


class ForwardTimer:
    """Times the forward passes of one stream, those of steps with prefill chunks apart from the others. Nothing waits
    for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._has_chunks = False
        self._started = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._events: deque[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Whether there are chunks, and the events around the forward pass, of those that were not over when they were
        looked at last."""
        self._seconds: dict[bool, float] = {}

    def start(self, *, has_chunks: bool) -> None:
        """Call it before the first thing that a forward pass launches."""
        self._has_chunks = has_chunks
        if self._on_gpu:
            self._start_event = _record()
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Call it behind the last thing that the forward pass launches."""
        if self._start_event is not None:
            self._events.append((self._has_chunks, self._start_event, _record()))
        else:
            self._seconds[self._has_chunks] = time.perf_counter() - self._started

    def seconds(self) -> float | None:
        """Return the time that the forward pass which was started last will take: that of the last one of its kind that
        is over. None: there was none."""
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            has_chunks, started, ended = self._events.popleft()
            self._seconds[has_chunks] = started.elapsed_time(ended) / 1e3
        return self._seconds.get(self._has_chunks)


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
