"""PatienceTimer: how long a step should wait for late masks, judged by the timing of earlier steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

_LAUNCHES, _LIKELY = 16, 0.9
"""A launch is expected to take as long as the quantile `_LIKELY` of the last `_LAUNCHES`. Launches with new slots take
twice as long as others, and cannot be foreseen. Going on too early costs little, because the device itself waits for
late masks; going on too late makes it wait for the launch."""
_FIRST_LAUNCH_SECONDS = 1e-3
_MOST_SPARE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that a step waits for late masks. Waiting is free while the device computes the step's forward pass.
    After that it costs the time of all rows, while leaving rows out costs only their share of a step."""

    free_until: float
    """The `time.perf_counter()` until which waiting is free."""
    step_seconds: float
    """The duration of a step, in seconds."""

    def ends_at(self, num_late: int, num_rows: int) -> float:
        """Return the time at which to go on without `num_late` of the step's rows."""
        return self.free_until + self.step_seconds * num_late / num_rows


class PatienceTimer:
    """Times the steps whose rows have masks: the device's forward passes (those with prefill chunks separately) and the
    host. It never waits for the device. A step calls the methods in the order below."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._has_chunks = False
        self._started = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._events: deque[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Forward passes not yet known to have finished: whether they have chunks, and the events around them."""
        self._forward_seconds: dict[bool, float] = {}
        self._launches = deque([_FIRST_LAUNCH_SECONDS], maxlen=_LAUNCHES)
        """Seconds that the host took from a step's masks to the launch of the next forward pass."""
        self._free_since = 0.0
        """The `time.perf_counter()` at which the device began the last forward pass launched."""
        self._went_on_at: float | None = None
        """The `time.perf_counter()` at which the last step went on with its masks; None after the next launch."""
        self._last_went_on_at = 0.0
        self._step_seconds = _FIRST_LAUNCH_SECONDS
        """The time from there until the next step has nothing left to do but wait for masks, in seconds."""

    def before_forward(self, *, has_chunks: bool) -> None:
        """Note that a forward pass is about to be launched."""
        self._has_chunks = has_chunks
        if self._on_gpu:
            self._start_event = _record()
        else:
            self._started = time.perf_counter()

    def launched(self) -> None:
        """Note that the forward pass has been launched."""
        if self._start_event is not None:
            self._events.append((self._has_chunks, self._start_event, _record()))
        else:
            self._forward_seconds[self._has_chunks] = time.perf_counter() - self._started
        if self._went_on_at is not None:
            self._launches.append(time.perf_counter() - self._went_on_at)
            self._went_on_at = None

    def tokens_came(self) -> None:
        """Note that the previous step's tokens are on the host, so the device has begun the forward pass."""
        self._free_since = time.perf_counter()

    def patience(self) -> Patience | None:
        """Return the patience of a step that is about to wait; None before anything is known."""
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            has_chunks, started, ended = self._events.popleft()
            self._forward_seconds[has_chunks] = started.elapsed_time(ended) / 1e3
        self._step_seconds = min(time.perf_counter() - self._last_went_on_at, 2 * self._step_seconds)
        seconds = self._forward_seconds.get(self._has_chunks)
        if seconds is None:
            return None
        # The next launch should end before the device is done, or the device waits.
        busy = max(0.0, seconds - self.launch_seconds) if self._on_gpu else 0.0
        # The host may take longer for a step than the device does.
        return Patience(self._free_since + busy, max(seconds, self._step_seconds))

    @property
    def spare_seconds(self) -> float:
        """The seconds for which a step's output may wait without delaying the device, which computes the next step
        meanwhile: the engine needs the rest of that time for the step after it."""
        seconds = self._forward_seconds.get(self._has_chunks, 0.0) if self._on_gpu else 0.0
        return min(_MOST_SPARE_SECONDS, max(0.0, seconds / 2 - self.launch_seconds))

    def went_on(self) -> None:
        """Note that the step goes on with the masks that have arrived."""
        self._went_on_at = self._last_went_on_at = time.perf_counter()

    @property
    def launch_seconds(self) -> float:
        """The expected duration of the next launch, in seconds."""
        return sorted(self._launches)[int(_LIKELY * len(self._launches))]


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
