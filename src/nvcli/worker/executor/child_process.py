"""ChildProcess: a Python process that nvcli starts, and that dies with its parent.

Children are fresh interpreters (no fork of threads or CUDA state, no re-import of the parent's main module). Each has
one socket to its parent: its first message is the child's argument, and its end of file tells either side at once that
the other is gone. A child also asks the kernel to be killed when its parent dies, ignores the signals of a terminal
(the parent decides what they mean), and writes what libraries print to standard error: standard output is for results.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

from nvcli.core.system.control_group import count_oom_kills
from nvcli.core.system.process_control import describe_end, end_with_parent, ignore_terminal

_CHILDREN_SECONDS = 5.0
"""Seconds that a process gets to end its own children; one with a GPU needs time to exit."""


class ChildProcess:
    """A child process. `control` is the parent's end of its socket."""

    def __init__(
        self,
        target: str,
        argument: Any,
        *,
        name: str,
        pass_fds: tuple[int, ...] = (),
        env: Mapping[str, str] | None = None,
        output_fd: int = 2,
    ) -> None:
        """Start `target` ("module:function") as function(argument, control) in a new process.

        `argument` is pickled. None: not known yet; the function receives it over its `control` once `send` is called.
        File descriptors in `pass_fds` keep their numbers in the child. `env` holds defaults; variables that the user
        has set take precedence. `output_fd` receives what the child prints.
        """
        self.name = name
        self._oom_kills = count_oom_kills()
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            search_path = os.pathsep.join(p for p in sys.path if p)
            # -P: the user's folder must not shadow modules. Library output must not reach standard output.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "nvcli.worker.executor.child_process", target, str(fd), str(os.getpid())],
                pass_fds=(fd, *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                env={**(env or {}), **os.environ, "PYTHONPATH": search_path},
                process_group=0,
            )
        self.control = Connection(ours.detach())
        self.send(argument)

    def send(self, argument: Any) -> None:
        """Send an argument to the process."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died already; readers will see the end
            self.control.send(argument)

    def limit_sends(self, seconds: float) -> None:
        """Make sends raise BlockingIOError from now on if the child does not read for this many seconds."""
        whole, rest = divmod(seconds, 1.0)
        with socket.socket(fileno=os.dup(self.control.fileno())) as ours:  # one socket, shared by all descriptors
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole), int(rest * 1e6)))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, a debugger) has stopped the process: alive, but doing nothing."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def describe_exit(self, timeout: float = 1.0) -> str:
        """Describe how the process ended, for messages. Waits up to `timeout` seconds for one that is just ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        code = self._popen.poll()
        if code is None:
            return "closed its connection but still runs"
        return describe_end(code) + self._blame_memory(code)

    def _blame_memory(self, code: int) -> str:
        """Say that the kernel probably killed the process because memory ran out; empty if nothing suggests it.

        The kernel counts out-of-memory kills without naming the processes, so this compares the counts now and at the
        start.
        """
        now = count_oom_kills()
        if code != -signal.SIGKILL or now is None or self._oom_kills is None or now.count <= self._oom_kills.count:
            return ""
        number = now.count - self._oom_kills.count
        return (
            f", probably because memory ran out: the kernel's out-of-memory killer ended {number} "
            f"process{'es' if number > 1 else ''} of {now.where} meanwhile. Free or add RAM, or use less of it, for "
            "example with --dtype bfloat16 or a lower kv_cache_memory"
        )

    def kill(self) -> None:
        """Kill the process without waiting; `close` must still be called."""
        self._popen.kill()

    def close(self, grace: float = 0.0, *, has_children: bool = False) -> None:
        """End the process: wait `grace` seconds for it to end by itself, then kill it. Idempotent.

        A process that `has_children` gets time to end them (`end_at_sigterm`) before it is killed.
        """
        self._wait(grace)
        if has_children and self.is_alive:
            self._popen.send_signal(signal.SIGTERM)
            self._popen.send_signal(signal.SIGCONT)  # it may be stopped
            self._wait(_CHILDREN_SECONDS)
        if self.is_alive:
            self._popen.kill()
        self._popen.wait()
        if not self.control.closed:
            self.control.close()

    def _wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to end on its own."""
        deadline = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)


def end_at_sigterm() -> None:
    """Make SIGTERM end this process's children first, then the process itself.

    Orphaned children are adopted by process 1, which in many containers never reaps them, so they would stay in the
    process table.
    """

    def end(number: int, frame: FrameType | None) -> None:
        end_children()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def end_children(number: signal.Signals = signal.SIGKILL) -> None:
    """Terminate the children of this process, and wait until they are gone."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread or the child has ended
            for pid in (thread / "children").read_text().split():
                os.kill(int(pid), number)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _main() -> None:
    target, fd, parent_pid = sys.argv[1:]
    ignore_terminal()
    end_with_parent(int(parent_pid), signal.SIGKILL)
    os.set_inheritable(int(fd), False)  # a compiler started by this process may outlive it
    control = Connection(int(fd))
    try:
        argument = control.recv()
        resolve_name(target)(argument, control)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent hung up: there is no one to report to.
        os._exit(1)


if __name__ == "__main__":
    _main()
