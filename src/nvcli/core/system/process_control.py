"""Linux controls of a process: when it ends, which signals it gets, and how precisely it sleeps."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000


def end_with_parent(parent_pid: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; end at once if the parent is already gone."""
    _ask(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(1)


def ignore_terminal() -> None:
    """Ignore signals of the terminal, which reach all processes of a command; the first process handles them."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def sleep_exactly() -> None:
    """Reduce Linux's timer slack for the calling thread, and those that it starts later, to one microsecond. The
    default is 50, so that several threads wake together."""
    _ask(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS)


def describe_end(code: int) -> str:
    """Describe how a process ended, for messages. `code` is as in `subprocess`: negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _ask(request: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(request, argument)
