"""Shows text a page at a time on a terminal, through `$PAGER` or less, and prints it elsewhere.

Text is generated only as far as it is read: a pager that quits stops the generator.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType

_LESS = "FRX"
"""Flags of less: exit at once if everything fits on the screen (F), show colours (R), and leave the text there (X)."""


class _PagerLeft(BaseException):
    """The user quit the pager."""


def print_pages(texts: Iterable[str]) -> None:
    """Print texts on standard output. Raises OutputGone if their reader has gone, unless it is a pager."""
    texts = iter(texts)
    first = next(texts, None)  # errors come before a pager is started
    if first is None:
        return
    texts = chain((first,), texts)
    command = _pager() if sys.stdout.isatty() else None
    if command is None:
        for text in texts:
            sys.stdout.write(text)
        sys.stdout.flush()
        return
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, errors="replace", env={"LESS": _LESS, **os.environ}
    ) as pager:
        assert pager.stdin is not None
        with contextlib.suppress(_PagerLeft, BrokenPipeError), _watching(pager):
            for text in texts:
                pager.stdin.write(text)
                pager.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            pager.stdin.close()
        with _interrupts_ignored():  # Ctrl-C is for the pager
            pager.wait()


def _pager() -> list[str] | None:
    """Return the command of the pager; None if none can be started."""
    commands = [shlex.split(os.environ.get("PAGER", "")), ["less"], ["more"]]
    return next((command for command in commands if command and shutil.which(command[0])), None)


@contextlib.contextmanager
def _watching(pager: subprocess.Popen[str]) -> Iterator[None]:
    """Make the end of the pager raise `_PagerLeft`, even while text is being generated."""

    def look(number: int, frame: FrameType | None) -> None:
        if pager.poll() is not None:
            raise _PagerLeft

    before = signal.signal(signal.SIGCHLD, look)
    try:
        with _interrupts_ignored():
            yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
