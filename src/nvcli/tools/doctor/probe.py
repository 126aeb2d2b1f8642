"""Probe: a check in its own process, because it imports torch and may crash or hang; both count as results.

A probe's `module:function` is called with (argument, control) and sends one message: its result.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

from nvcli.worker.executor.child_process import ChildProcess

_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
"""The beginning of a traceback's last line."""
_OWN_ERROR = re.compile(r"^nvcli\.errors\.\w+: ")
"""The type before a message of our own, which needs none."""


class ProbeFailed(Exception):
    """The probe crashed or did not answer in time; the message says which."""


class Probe:
    """A running probe. A context manager, which ends the process on exit."""

    def __init__(
        self,
        target: str,
        argument: Any,
        *,
        name: str,
        timeout: float,
        pass_fds: tuple[int, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the probe. File descriptors in `pass_fds` keep their numbers in it; `env` holds defaults for variables
        that the user did not set."""
        self.name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._output = _unnamed_file()
        self.child = ChildProcess(
            target, argument, name=name, pass_fds=pass_fds, env=env, output_fd=self._output.fileno()
        )

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close()
        self._output.close()

    def result(self) -> Any:
        """Wait for the probe's message and return it. Raises ProbeFailed."""
        if not self.child.control.poll(max(0.0, self._deadline - time.monotonic())):
            raise ProbeFailed(f"no answer within {self._timeout:g} s{self.last_words()}")
        try:
            return self.child.control.recv()
        except (EOFError, ConnectionResetError):
            raise ProbeFailed(f"the check {self.child.describe_exit()}{self.last_words()}") from None

    def last_words(self) -> str:
        """Return the end of the process's output, to append to a message: its error, or else its last line."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if _ERROR.match(line)]
        return f": {_OWN_ERROR.sub('', (errors or lines)[-1].strip())}" if lines else ""


def _unnamed_file() -> IO[bytes]:
    """Open a file in memory, or else in a folder; other checks report whether the machine supports either."""
    try:
        return open(os.memfd_create("nvcli-probe"), "w+b")
    except OSError:
        return tempfile.TemporaryFile()
