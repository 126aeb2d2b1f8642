"""The signals that ask a command to end: from its user, its terminal, its machine or a job scheduler."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def handle_end_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of the signals that ask for the end, and return the handlers that were set before.

    A signal that whoever started the command has it ignore stays ignored (`nohup` does so with SIGHUP, a shell with
    SIGQUIT of a command in the background), except SIGINT. Call it from the main thread.
    """
    before: dict[signal.Signals, Any] = {}
    for number in _END_SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before
