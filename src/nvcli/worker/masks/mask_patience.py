"""PatienceTimer: how long a step should wait for late masks, by the times of the steps before it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

_LAUNCHES, _LIKELY = 16, 0.9
"""A launch is expected to take as long as nine tenths of the last ones did at the most. Those of steps with new slots
take twice as long as others, and nobody knows which comes next. To go on too early costs little, because the device
waits for late masks by itself; to go on too late lets it wait for the launch."""
_FIRST_LAUNCH_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that a step waits for late masks. As long as the device computes the step's forward pass, waiting costs
    nothing. Then it costs the time of all rows, where leaving some rows out costs their part of a step."""

    free_until: float
    """The `time.perf_counter()` until which waiting costs nothing."""
    step_seconds: float
    """The time that a step takes."""

    def ends_at(self, num_late: int, num_rows: int) -> float:
        """Return the time at which to go on without `num_late` of the step's rows."""
        return self.free_until + self.step_seconds * num_late / num_rows


class PatienceTimer:
    """Times the steps whose rows have masks: the device's forward passes, those with prefill chunks apart from the
    others, and the host. Nothing waits for the device. A step calls the methods in their order here."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._has_chunks = False
        self._started = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._events: deque[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Whether there are chunks, and the events around the forward pass, of those that were not over when they were
        looked at last."""
        self._forward_seconds: dict[bool, float] = {}
        self._launches = deque([_FIRST_LAUNCH_SECONDS], maxlen=_LAUNCHES)
        """The seconds that the host took from a step's masks until the next forward pass was launched."""
        self._free_since = 0.0
        """The `time.perf_counter()` at which the device began the forward pass that was launched last."""
        self._went_on_at: float | None = None
        """The `time.perf_counter()` at which the last step went on with its masks, until the next launch."""
        self._last_went_on_at = 0.0
        self._step_seconds = _FIRST_LAUNCH_SECONDS
        """The time from then until the next step has nothing to do but to wait for masks."""

    def before_forward(self, *, has_chunks: bool) -> None:
        """Note that a forward pass is launched next."""
        self._has_chunks = has_chunks
        if self._on_gpu:
            self._start_event = _record()
        else:
            self._started = time.perf_counter()

    def launched(self) -> None:
        """Note that it is launched."""
        if self._start_event is not None:
            self._events.append((self._has_chunks, self._start_event, _record()))
        else:
            self._forward_seconds[self._has_chunks] = time.perf_counter() - self._started
        if self._went_on_at is not None:
            self._launches.append(time.perf_counter() - self._went_on_at)
            self._went_on_at = None

    def tokens_came(self) -> None:
        """Note that the tokens of the steps before are on the host: the device is at the forward pass."""
        self._free_since = time.perf_counter()

    def patience(self) -> Patience | None:
        """Return the patience of a step that is about to wait; None: nothing is known yet."""
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            has_chunks, started, ended = self._events.popleft()
            self._forward_seconds[has_chunks] = started.elapsed_time(ended) / 1e3
        self._step_seconds = min(time.perf_counter() - self._last_went_on_at, 2 * self._step_seconds)
        seconds = self._forward_seconds.get(self._has_chunks)
        if seconds is None:
            return None
        # The next launch is to end before the device is done, or the device waits.
        busy = max(0.0, seconds - self.launch_seconds) if self._on_gpu else 0.0
        # The host may take longer for a step than the device does.
        return Patience(self._free_since + busy, max(seconds, self._step_seconds))

    def went_on(self) -> None:
        """Note that the step goes on with the masks that are there."""
        self._went_on_at = self._last_went_on_at = time.perf_counter()

    @property
    def launch_seconds(self) -> float:
        """The time that the next launch will likely take."""
        return sorted(self._launches)[int(_LIKELY * len(self._launches))]


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
