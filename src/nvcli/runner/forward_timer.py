"""ForwardTimer and LaunchTimer: how long the device takes for a forward pass, and the host until it has launched the
next one, measured in the steps whose rows wait for masks."""

from __future__ import annotations

import time
from collections import deque

import torch

_LAUNCHES, _LIKELY = 16, 0.9
"""A launch is expected to take as long as nine tenths of the last ones did at the most. Those of steps with new slots
take twice as long as others, and nobody knows which comes next. To go on too early costs little, because the device
waits for late masks by itself; to go on too late lets it wait for the launch."""


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


class LaunchTimer:
    """Times the host from the masks of a step until the next step's forward pass is launched. All times are those of
    `time.perf_counter()`."""

    def __init__(self, first_seconds: float) -> None:
        """`first_seconds` is expected before anything was measured."""
        self._started: float | None = None
        self._seconds = deque([first_seconds], maxlen=_LAUNCHES)

    def start(self, now: float) -> None:
        """Note that a step goes on with its masks."""
        self._started = now

    def stop(self, now: float) -> None:
        """Note that a forward pass is launched, the first since then or a later one."""
        if self._started is not None:
            self._seconds.append(now - self._started)
            self._started = None

    def seconds(self) -> float:
        """Return the time that the next launch will likely take."""
        return sorted(self._seconds)[int(_LIKELY * len(self._seconds))]


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
