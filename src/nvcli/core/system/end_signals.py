"""Signals that ask a command to end: from its user, its terminal, its machine or a job scheduler."""

from __future__ import annotations

import _thread
import enum
import os
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAIT_SECONDS = 0.02
_LONGEST_WAIT = 10.0
_FINISHED_FIRST = (
    "<frozen importlib._bootstrap>",
    str(Path(__file__).parents[1] / "validation.py"),
    typing.__file__,
    enum.__file__,
)
"""Files with the code of imports, of conversions by msgspec, and of what msgspec calls when it makes a decoder."""
_LOOK_SECONDS = 0.25
_STUCK_LOOKS = 6
"""Number of polls after which a pending signal counts as not reaching the main thread."""

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def handle_end_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of all end signals, and return the previous handlers.

    A signal that was already ignored at the start stays ignored (`nohup` does so with SIGHUP, a shell with
    SIGQUIT of a background command), except SIGINT. The handler is called at a safe place
    (`at_safe_place`). Call it from the main thread.
    """
    if not isinstance(handler, signal.Handlers):
        handler = at_safe_place(handler)
    before: dict[signal.Signals, Any] = {}
    for number in _END_SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before


def watch_main_thread(give_up: Callable[[], Any]) -> threading.Thread:
    """Start a thread that calls `give_up` once an end signal has been pending for 1.5 s. Returns the thread.

    A thread that waits for a file system that does not answer, such as NFS without its server, takes no signal
    but SIGKILL. Python's handlers run in the main thread, so they do not run while it waits like this.
    """
    thread = threading.Thread(target=_watch, args=(give_up,), name="nvcli-signals", daemon=True)
    thread.start()
    return thread


def _watch(give_up: Callable[[], Any]) -> None:
    num_looks = 0
    while num_looks < _STUCK_LOOKS:
        time.sleep(_LOOK_SECONDS)
        try:
            num_looks = num_looks + 1 if _is_end_waiting() else 0
        except OSError:  # there is no /proc
            return
    give_up()


def _is_end_waiting() -> bool:
    """Tell whether an end signal is pending: not blocked, and not yet delivered to its handler."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    masks = {name: int(value, 16) for name, value in lines if name in ("SigPnd", "ShdPnd", "SigBlk")}
    waiting = (masks["SigPnd"] | masks["ShdPnd"]) & ~masks["SigBlk"]
    return any(waiting >> number - 1 & 1 for number in _END_SIGNALS)


def at_safe_place(handler: Callable[[int, FrameType | None], Any]) -> Handler:
    """Wrap a signal handler so that it is only called outside of imports and of conversions by msgspec.

    Extension modules lose what a handler raises during their import, as msgspec does while it inspects types, or go
    on half initialised, and class bodies may turn it into another error. A delay of more than `_LONGEST_WAIT`
    seconds is cut short. The callers of this function may themselves be part of an import.
    """
    return _AtSafePlace(handler, sum(1 for _ in _frames(sys._getframe(1))) - 2)


class _AtSafePlace:
    def __init__(self, handler: Callable[[int, FrameType | None], Any], num_outer: int) -> None:
        """The `num_outer` outermost frames of the stack do not count."""
        self._handler = handler
        self._num_outer = num_outer
        self._waits_since: dict[int, float] = {}
        """Signal → time of its first arrival, for signals that are sent again."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        since = self._waits_since.pop(number, now)
        if self._is_foreign(frame) and now - since < _LONGEST_WAIT:
            # `threading` takes a lock to start a thread, which the frame that is interrupted here may hold.
            _thread.start_new_thread(self._send_again, (number, since))
        else:
            self._handler(number, frame)

    def _send_again(self, number: int, since: float) -> None:
        time.sleep(_WAIT_SECONDS)
        self._waits_since[number] = since
        os.kill(os.getpid(), number)

    def _is_foreign(self, frame: FrameType | None) -> bool:
        files = [one.f_code.co_filename for one in _frames(frame)]
        return any(file in _FINISHED_FIRST for file in files[: max(0, len(files) - self._num_outer)])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the outermost last."""
    while frame is not None:
        yield frame
        frame = frame.f_back
