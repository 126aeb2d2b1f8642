"""Whoever asks a command to end is heard, and a signal that it was started to ignore stays ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nvcli.end_signals import handle_end_signals

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_signals_that_ask_for_the_end_are_handled() -> None:
    heard: list[int] = []
    before = handle_end_signals(lambda number, frame: heard.append(number))
    assert before == dict.fromkeys(SIGNALS, signal.SIG_DFL)
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert heard == SIGNALS


def test_what_was_ignored_stays_so_but_for_ctrl_c() -> None:
    heard: list[int] = []
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    assert set(handle_end_signals(lambda number, frame: heard.append(number))) == {signal.SIGINT}
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert heard == [signal.SIGINT]
