"""Whoever asks a command to end is heard, and a signal that it was started to ignore stays ignored."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import nvcli.core.system.end_signals
from nvcli.cli import main
from nvcli.core.system.end_signals import Handler, handle_end_signals
from nvcli.core.validation import InvalidValue, convert

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


STUCK = """
import ctypes, os, platform, signal, sys, time
import nvcli.core.system.end_signals
from nvcli.core.system.end_signals import handle_end_signals, watch_main_thread

nvcli.core.system.end_signals._LOOK_SECONDS = 0.03
handle_end_signals(lambda number, frame: print("heard", flush=True))
watch_main_thread(lambda: os._exit(130))
signal.raise_signal(signal.SIGTERM)
time.sleep(0.3)
print("ready", flush=True)
clone = {"x86_64": 56}.get(platform.machine(), 220)
# As in a read of a file system that does not answer, nothing but SIGKILL ends the wait for the child of a vfork.
if ctypes.CDLL(None).syscall(clone, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(60)
    os._exit(0)
"""


def test_a_signal_that_does_not_reach_the_main_thread_ends_the_process_all_the_same() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == [b"heard\n", b"ready\n"]
        while "\nState:\tD" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


IMPORTED = """
import signal

class Interrupting:
    def __set_name__(self, owner, name):  # before Python 3.12 any error comes out of here as a RuntimeError
        signal.raise_signal(signal.SIGINT)
        reached.append(name)

reached = []
class Owner:
    member = Interrupting()
"""


def test_an_import_is_not_interrupted_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_whole.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    handle_end_signals(signal.default_int_handler)

    found = []

    def import_and_wait() -> None:
        found.append(importlib.import_module("imported_whole").reached)
        time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        import_and_wait()
    assert found == [["member"]]


def test_a_conversion_is_not_interrupted_in_the_middle() -> None:
    """Where msgspec looks at a type for the first time, it loses what is raised there."""
    hashed: list[int] = []

    class Interrupting(type):
        def __hash__(cls) -> int:
            hashed.append(1)
            if len(hashed) == 1:
                signal.raise_signal(signal.SIGINT)
            return 1

    def convert_and_wait() -> None:
        with pytest.raises(InvalidValue, match="is 1"):
            convert(1, cast(type[object], Interrupting("Kind", (), {})))
        time.sleep(10)

    handle_end_signals(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        convert_and_wait()


def test_an_import_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcli.core.system.end_signals, "_LONGEST_WAIT", 0.1)
    (tmp_path / "imported_for_long.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    handle_end_signals(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("imported_for_long")


def test_a_program_that_runs_while_it_is_imported_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has called whoever set the handler does not count."""
    (tmp_path / "imported_program.py").write_text(
        "import signal, nvcli.core.system.end_signals\n"
        "def run():\n"
        "    nvcli.core.system.end_signals.handle_end_signals(signal.default_int_handler)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    raise AssertionError('it went on')\n"
        "def main():\n"
        "    run()\n"
        "main()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("imported_program")


def test_a_signal_while_the_command_ends_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def handle_late(handler: Handler) -> None:
        signal.raise_signal(signal.SIGINT)
        handle_end_signals(handler)
        signal.raise_signal(signal.SIGINT)

    def run() -> int:
        monkeypatch.setattr(main, "handle_end_signals", handle_late)
        return 3

    monkeypatch.setattr(main, "watch_main_thread", lambda give_up: threading.current_thread())
    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(main, "_exit", lambda code, watch: codes.append(code))
    main.main()
    assert codes == [3]
