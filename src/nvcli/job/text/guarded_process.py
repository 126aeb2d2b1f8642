"""GuardedProcess: runs work that may never end, or take all memory, in a process that can be killed.

Some work comes from untrusted input: the chat template of a checkpoint, the schema of a row. Only killing its process
is sure to end it. The process starts with the first question, is killed when one takes too long, and is started again
for the next one. A question that killed its process or took too long is asked once more, in a fresh process: the cause
may have been something else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvcli.errors import LoadError, WorkerError
from nvcli.worker.executor.child_process import ChildProcess

PATIENCE = 3
"""Rows that may take too long in their process before others get less time."""
_WAIT_SECONDS = 0.25
_SHARE_BEHIND = 0.1
"""The share of the timeout that these get."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a question was not answered."""

    reason: str
    """The end of a sentence about the process, such as `exited with code 1`; empty after `close`."""
    is_late: bool = False
    """Whether the process took too long, which may also mean that the machine was busy."""


class GuardedProcess:
    """Asks questions of one process at a time.

    Used by one thread; `close` may be called by any.
    """

    def __init__(
        self,
        target: str,
        argument: Any,
        *,
        name: str,
        max_seconds: float,
        patience: float = math.inf,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`target`, `argument`, `name` and `env` are those of a ChildProcess.

        The process first sends an empty message, or the reason for which it cannot work. It then answers each message
        by one of bytes, within `max_seconds`. Once `patience` rows have taken longer, others get a tenth of that, once.
        """
        self._target = target
        self._argument = argument
        self._name = name
        self._max_seconds = max_seconds
        self._patience = patience
        self._num_late = 0
        """Questions that were given up because they took too long."""
        self._env = env
        self.process: ChildProcess | None = None
        """The process, if one is running."""
        self._lock = threading.Lock()
        """Held while the process is in use."""
        self._closed = False

    def ask(self, question: Any, *, is_last: bool = True) -> bytes | NoAnswer:
        """Send a question, which is pickled, and return the answer.

        One that takes too long is asked once more, unless the caller has another way to ask it (`is_last` is False).
        Raises LoadError with the reason that the process gives at its start, and WorkerError where none can be started.
        """
        with self._lock:
            return self._ask(question, is_last=is_last)

    def close(self) -> None:
        """Kill the process, even while it works. Nothing is answered after that. Idempotent."""
        self._closed = True
        process = self.process
        if process is not None:
            process.kill()  # so that whoever waits for it lets go of the lock
        with self._lock:
            self._drop()

    def _ask(self, question: Any, *, is_last: bool) -> bytes | NoAnswer:
        missing = NoAnswer("")
        seconds, why = self._max_seconds, ""
        is_patient = self._num_late < self._patience
        if not is_patient:
            why = f", all that is left once {self._patience} rows have taken more than {seconds:g} s"
            seconds *= _SHARE_BEHIND
        for _ in range(2):
            if self._closed:
                return NoAnswer("")
            process = self.process or self._start()
            try:
                process.control.send(question)
                if self._wait(process, seconds):
                    return process.control.recv_bytes()
                missing = NoAnswer(f"is not done after {seconds:g} s{why}", is_late=True)
            except (EOFError, OSError):
                missing = NoAnswer("" if self._closed else process.describe_exit())
            self._drop()
            if missing.is_late and not (is_last and is_patient):
                break
        self._num_late += is_last and missing.is_late
        return missing

    def _start(self) -> ChildProcess:
        """Start the process, and wait until it is ready, however long that takes."""
        process = self.process = ChildProcess(self._target, self._argument, name=self._name, env=self._env)
        try:
            while not self._wait(process, _WAIT_SECONDS):
                pass
            problem = process.control.recv_bytes().decode()
        except (EOFError, OSError):
            if not self._closed:
                raise WorkerError(f"the {self._name} {process.describe_exit()} at its start") from None
        else:
            if problem:
                raise LoadError(problem)
        return process

    def _wait(self, process: ChildProcess, seconds: float) -> bool:
        """Wait for an answer, and tell whether there is one. Raises EOFError after `close`.

        Waits are counted, not timed, so that a run that was stopped (Ctrl-Z) goes on where it was.
        """
        for _ in range(max(1, round(seconds / _WAIT_SECONDS))):
            if self._closed:
                raise EOFError
            if process.control.poll(_WAIT_SECONDS):
                return True
        return False

    def _drop(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None
