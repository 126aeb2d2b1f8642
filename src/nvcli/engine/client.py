"""EngineClient: the parent's end of one engine replica."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import msgspec

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.core.system.process_limits import with_address_space
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.protocol import (
    AbortRequests,
    AddRequests,
    CloseEngine,
    EngineClosed,
    EngineFailed,
    EngineStart,
    ForgetPrefixes,
    FromEngine,
    OutputBatch,
    ToEngine,
)
from nvcli.engine.request import EngineStats, Request, RequestOutput, StepRecord
from nvcli.errors import NvcliError, WorkerError
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.ranks import MODEL_RUNNER

_STOPPED_CHECK_SECONDS = 0.5
"""Seconds between checks whether a signal has stopped a silent engine."""

_MESSAGE_SAMPLES = 256
_MESSAGE_BYTES = 512 * 1024
"""Samples, and bytes of prompts, per message. The engine spends a few milliseconds on this many, and they usually fill
its first step."""


class EngineClient:
    """Sends requests to an engine's process and receives its outputs. For use by one thread.

    The engine reports its ranks' failures. A caller waiting for the engine learns at once if its process died, and
    within `step_timeout` if a signal stopped it.
    """

    def __init__(self, process: ChildProcess, *, step_timeout: float) -> None:
        """`step_timeout` is in seconds."""
        self._process = process
        self._timeout = step_timeout
        self._last_check = 0.0
        self._stopped_since: float | None = None
        """When the engine was first seen stopped by a signal; None while it runs."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._stats = EngineStats()
        self._steps: list[StepRecord] = []
        self._notes: list[str] = []
        self._failure: NvcliError | None = None
        """The error with which the engine ended, once `poll` has seen it."""
        self._ready: EngineReady | None = None
        self._changed: WeightsChanged | None = None
        """The answer to a change of the weights, until it is taken."""

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        name: str = "engine",
        runner: str = MODEL_RUNNER,
        process: ChildProcess | None = None,
    ) -> EngineClient:
        """Start the engine, which starts its ranks; returns at once. `process` is one of `engine_ahead`; None: spawn a
        new one."""
        start = EngineStart(config=config, runner=runner)
        if process is None:
            process = ChildProcess("nvcli.engine.engine_ahead:main", start, name=name)
        else:
            process.send(start)
        process.limit_sends(config.step_timeout)
        return cls(process, step_timeout=config.step_timeout)

    def wait_ready(self, timeout: float | None = None) -> EngineReady | None:
        """Wait for the engine's report; None if it is not ready within `timeout` seconds (None: wait forever).

        Raises the LoadError, CapacityError or ConfigError that a rank failed with, or WorkerError.
        """
        if self._ready is None and self._has_message(timeout):
            message = self._receive()
            assert isinstance(message, EngineReady)
            self._ready = message
        return self._ready

    def add(self, requests: list[Request]) -> None:
        """Send requests to the engine, split into messages so that it can begin before all have arrived."""
        message: list[Request] = []
        num_samples = num_bytes = 0
        for request in requests:
            message.append(request)
            num_samples += request.n
            num_bytes += len(request.prompt_ids)
            if num_samples >= _MESSAGE_SAMPLES or num_bytes >= _MESSAGE_BYTES:
                self._send(AddRequests(message))
                message, num_samples, num_bytes = [], 0, 0
        if message:
            self._send(AddRequests(message))

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests early; each that has not ended by then gets an output with finish_reason `abort`."""
        self._send(AbortRequests(list(request_ids)))

    def forget_prefixes(self) -> None:
        """Empty the engine's prefix cache."""
        self._send(ForgetPrefixes())

    def change_weights(self, change: WeightsChange) -> None:
        """Change the weights of the engine's ranks, or their memory, once all requests are finished. The answer comes
        with `poll`; `take_changed` returns it."""
        self._send(change)

    def take_changed(self) -> WeightsChanged | None:
        """Return the answer to `change_weights`, once; None if it has not come."""
        changed, self._changed = self._changed, None
        return changed

    def poll(self, timeout: float) -> list[RequestOutput]:
        """Return the outputs that have arrived, waiting up to `timeout` seconds for the first.

        If the engine failed, the outputs that it sent before are returned first; then its error is raised.
        """
        if self._failure is not None:
            raise self._failure
        outputs: list[RequestOutput] = []
        is_first = True
        try:
            while self._has_message(timeout if is_first else 0):
                message = self._receive()
                is_first = False
                if isinstance(message, WeightsChanged):
                    self._changed = message
                    continue
                assert isinstance(message, OutputBatch)
                outputs += message.outputs
                self._stats = message.stats
                self._steps += message.steps
                self._notes += message.notes
        except NvcliError as failure:
            self._failure = failure
            if is_first:
                raise
        return outputs

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something, for waiting on several engines at once."""
        return self._process.control.fileno()

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot from the engine."""
        return self._stats

    def take_steps(self) -> list[StepRecord]:
        """Return the step records that arrived since the last call; there are none unless `record_steps` is on."""
        steps, self._steps = self._steps, []
        return steps

    def take_notes(self) -> list[str]:
        """Return the messages for the log that arrived since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def finish(self) -> list[int]:
        """End an engine that has nothing left to do; return each rank's peak memory, in bytes.

        For engines with `record_steps`. `close` must still be called. Raises WorkerError.
        """
        self._send(CloseEngine())
        while True:
            if self._has_message(None) and isinstance(message := self._receive(), EngineClosed):
                return message.peak_bytes

    def close(self) -> None:
        """End the engine and its ranks. Idempotent."""
        can_receive = not self._process.control.closed and not self._process.is_stopped
        if can_receive:
            with contextlib.suppress(OSError):
                self._process.control.send_bytes(self._encoder.encode(CloseEngine()))
        self._process.close(grace=1.5 if self._ready and can_receive else 0.0, has_children=True)

    def _send(self, message: ToEngine) -> None:
        try:
            self._process.control.send_bytes(self._encoder.encode(message))
        except BlockingIOError:
            raise WorkerError(self._describe_stuck()) from None
        except OSError:
            pass  # the engine is gone: `poll` reports that once it has read the rest of the socket

    def _receive(self) -> FromEngine:
        if self._failure is not None:
            raise self._failure
        try:
            message = self._decoder.decode(self._process.control.recv_bytes())
        except (EOFError, OSError):
            ended = f"the {self._process.name} (pid {self._process.pid}) {self._process.describe_exit()}"
            raise with_address_space(WorkerError(f"{ended}; it was at: {self._phase}")) from None
        if isinstance(message, EngineFailed):
            error = errors.named(message.kind, message.message, message.traceback)
            raise with_address_space(error) if isinstance(error, WorkerError) else error
        return message

    def _has_message(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds (None: forever); return whether there is a message."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            wait = min(_STOPPED_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))
            if self._process.control.poll(wait):
                self._stopped_since = None
                return True
            self._check_moving()
            if time.monotonic() >= deadline:
                return False

    def _check_moving(self) -> None:
        """Raise WorkerError if the engine has been stopped by a signal for `step_timeout`."""
        now = time.monotonic()
        if now - self._last_check < _STOPPED_CHECK_SECONDS:
            return
        self._last_check = now
        if not self._process.is_stopped:
            self._stopped_since = None
            return
        if self._stopped_since is None:
            self._stopped_since = now
        if now - self._stopped_since > self._timeout:
            raise WorkerError(self._describe_stuck())

    def _describe_stuck(self) -> str:
        state = " (stopped by a signal)" if self._process.is_stopped else ""
        return (
            f"no answer within step_timeout ({self._timeout:g} s); "
            f"the {self._process.name} (pid {self._process.pid}) at {self._phase}{state}"
        )

    @property
    def _phase(self) -> str:
        return "start-up" if self._ready is None else "running"
