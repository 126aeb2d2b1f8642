"""Sleeps of some microseconds that end when they should."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000


def sleep_exactly() -> None:
    """Have Linux put off the end of sleeps of the thread that calls this, and of those that it starts from now on, by a
    microsecond at the most. Otherwise that is 50, so that it wakes several threads together."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS)
