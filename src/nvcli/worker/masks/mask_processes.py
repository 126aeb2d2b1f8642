"""The processes of the mask workers, from start to end. They are processes and not threads, because threads would spend
most of their time handing over the interpreter lock.

The first process loads the model's tokens and forks the workers, which share them. It tells the rank when a worker has
died, and forks a replacement once the rank sends a descriptor for its orders. Compiling or following a grammar may
overflow the stack or exhaust memory, so both are limited in workers: they have more stack than the process that checked
the grammar (`grammars.FOLLOW_STACK_BYTES`), and no more memory than the machine can spare. This module knows no torch.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from nvcli.core.grammars import FOLLOW_STACK_BYTES, GrammarError, Vocabulary
from nvcli.core.system.file_limits import resize_memory_file
from nvcli.core.system.host_memory import available_ram, limit_more_memory
from nvcli.core.system.process_control import describe_end, end_with_parent, ignore_terminal, sleep_exactly
from nvcli.worker.masks.mask_messages import Ended, Loaded, MaskStart, MaskTable, Raised, Report, memory_bytes
from nvcli.worker.masks.mask_worker import MaskWorker, OrderReader, serve

_LEAST_MEMORY, _MOST_MEMORY = 1 << 30, 4 << 30
"""Bounds on the memory that a worker may use besides the tokens, in bytes."""
_MAX_REPORT = 3000


class _FirstProcess:
    """The first process, once the tokens are loaded."""

    def __init__(self, start: MaskStart, table: MaskTable, report: socket.socket, vocabulary: Vocabulary) -> None:
        self._start, self._table, self._report, self._vocabulary = start, table, report, vocabulary
        self._max_memory = max(_LEAST_MEMORY, min(_MOST_MEMORY, available_ram() // start.num_workers))
        self._numbers: dict[int, int] = {}
        """Process id → worker number."""
        self._ended, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def fork(self, number: int, order_fd: int) -> None:
        """Fork a worker, which reads its orders from `order_fd`."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _work(self._start, self._table, self._report, self._vocabulary, number, order_fd, self._max_memory)
        self._numbers[pid] = number

    def watch(self) -> None:
        """Replace workers that die, until the rank is gone; then wait until all have ended."""
        while True:
            readable, _, _ = select.select([self._report.fileno(), self._ended], [], [])
            if self._report.fileno() in readable and not self._take_order():
                break
            if self._ended in readable:
                os.read(self._ended, 4096)
                self._reap()
        while self._numbers:
            pid, _ = os.wait()
            self._numbers.pop(pid, None)

    def end_others(self) -> None:
        """Kill the workers, and wait until they are gone."""
        for pid in self._numbers:
            with contextlib.suppress(ProcessLookupError):  # it has just been reaped
                os.kill(pid, signal.SIGKILL)
        for pid in self._numbers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _take_order(self) -> bool:
        """Fork the worker that the rank asks for; return False once the rank is gone."""
        data, fds, _, _ = socket.recv_fds(self._report, 8, 1)
        if not data:
            return False
        self.fork(*struct.unpack("q", data), *fds)
        os.close(fds[0])
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are none
            while (end := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = end
                number = self._numbers.pop(pid)
                if status:  # else the rank is gone
                    _tell(self._report, Ended(number, describe_end(os.waitstatus_to_exitcode(status))))


def _work(
    start: MaskStart,
    table: MaskTable,
    report: socket.socket,
    vocabulary: Vocabulary,
    number: int,
    order_fd: int,
    max_memory: int,
) -> None:
    """Run as a worker, and exit."""

    def run(function: Callable[..., None], *arguments: Any) -> None:
        code = 0
        try:
            function(*arguments)
        except BaseException:  # a panic in Rust code is not an Exception
            _tell(report, Raised(number, _traceback()))
            code = 1
        os._exit(code)

    def begin() -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)
        sleep_exactly()
        worker = MaskWorker(vocabulary, table, first=number, step=start.num_workers, finds_runs=start.finds_runs)
        orders = OrderReader(order_fd, stays_awake=start.stays_awake)
        limit_more_memory(max_memory)
        threading.stack_size(FOLLOW_STACK_BYTES)
        thread = threading.Thread(target=run, args=(serve, worker, orders), daemon=True)
        thread.start()
        thread.join()

    run(begin)


def _traceback() -> str:
    """Return the end of the current exception's traceback."""
    return traceback.format_exc()[-_MAX_REPORT:]


def _tell(report: socket.socket, message: Report) -> None:
    """Send the rank a report, if it is still there."""
    with contextlib.suppress(OSError):
        report.send(msgspec.msgpack.encode(message))


def main() -> None:
    """Load the tokens, fork the workers, and replace those that die, until the rank is gone.

    Arguments of the process: the `MaskStart`, the descriptors of the memory, which is empty until the tokens are
    loaded, and of a socket for `Report`s to the rank, and the rank's process id. Over the socket the rank sends back
    the number of each worker to start, with the descriptor from which it reads its orders.
    """
    start = msgspec.json.decode(sys.argv[1], type=MaskStart)
    memory_fd, report_fd, parent_pid = map(int, sys.argv[2:])
    ignore_terminal()
    first: _FirstProcess | None = None

    def end(number: int, frame: FrameType | None) -> None:
        if first is not None:
            first.end_others()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    end_with_parent(parent_pid, signal.SIGTERM)
    report = socket.socket(fileno=report_fd)
    try:
        try:
            vocabulary = Vocabulary.load(Path(start.model_path), vocab_size=start.vocab_size, end_ids=start.end_ids)
        except GrammarError:  # the file has changed since the parent read it: answers fail
            _tell(report, Loaded(0))
            os._exit(0)
        size = memory_bytes(start.num_rows, vocabulary.num_words)
        resize_memory_file(memory_fd, size)
        table = MaskTable.of(mmap.mmap(memory_fd, size), start.num_rows, vocabulary.num_words)
        _tell(report, Loaded(vocabulary.num_words))
        gc.freeze()
        first = _FirstProcess(start, table, report, vocabulary)
        first.watch()
    except BaseException:  # a panic in Rust code is not an Exception
        _tell(report, Raised(None, _traceback()))
        end(signal.SIGTERM, None)
    os._exit(0)


if __name__ == "__main__":
    main()
