"""Requests of a process to Linux: when it ends, which signals it hears, and how exactly it sleeps."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000


def end_with_parent(parent_pid: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, and end at once if it has ended already."""
    _ask(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os._exit(1)


def ignore_terminal() -> None:
    """Leave the signals of a terminal, which reach all processes of a command, to the first of them."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def sleep_exactly() -> None:
    """Have Linux put off the end of sleeps of the thread that calls this, and of those that it starts from now on, by a
    microsecond at the most. Otherwise that is 50, so that it wakes several threads together."""
    _ask(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS)


def describe_end(code: int) -> str:
    """Say how a process ended, for messages. `code` is as `subprocess` has it: negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _ask(request: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(request, argument)
