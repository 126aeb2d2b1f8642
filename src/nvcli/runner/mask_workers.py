"""MaskWorkers: a rank's side of the processes that make masks (`mask_worker.py`).

A mask takes some ten microseconds; one in a hundred takes a millisecond or more, and nobody knows which before. A step
asks for the masks of its rows, and waits for them as long as that costs less than to leave the late rows out of it
(`Patience`). Answers keep to their process (`RowPlaces`). A process does what it is asked for in order, so that nothing
need be waited for where another answer gets a row.

The processes end when the rank does, because what they read from comes to its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from nvcli.errors import WorkerError
from nvcli.process_control import sleep_exactly
from nvcli.runner.mask_messages import (
    FollowGrammar,
    MaskOrders,
    MaskStart,
    MaskTable,
    WantMask,
    memory_bytes,
    next_token,
)
from nvcli.runner.row_places import RowPlaces

_MODULE = "nvcli.runner.mask_worker"
_PIPE_BYTES = 1 << 20
"""Orders that a process may have before it reads them; more, where the system allows no such pipe, make the rank
wait."""
_LOOK_SECONDS = 50e-6
"""How often a step looks for masks, but all the time at first."""
_EAGER_SECONDS = 200e-6
_CHECK_SECONDS = 0.1
"""How often steps that wait look whether the processes are there."""
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a step waits for late masks. As long as the device computes the step's forward pass, waiting costs
    nothing. Then it costs the time of all rows, where leaving some rows out costs their part of a step."""

    free_until: float
    """The `time.perf_counter()` until which waiting costs nothing."""
    step_seconds: float
    """The time that a step takes."""

    def ends_at(self, num_late: int, num_rows: int) -> float:
        """Return the time at which to go on without `num_late` of the step's rows."""
        return self.free_until + self.step_seconds * num_late / num_rows


class MaskWorkers:
    """The processes and the memory of one rank."""

    def __init__(
        self,
        model_path: Path,
        *,
        vocab_size: int,
        end_ids: Sequence[int],
        num_rows: int,
        num_workers: int,
        stays_awake: bool,
    ) -> None:
        """Begin to start the processes, which load the tokens of the model; see `MaskStart`."""
        self.end_ids = [*end_ids]
        self._num_rows = num_rows
        self._memory_fd = os.memfd_create("nvcli-masks")
        report_fd, their_report_fd = os.pipe()
        pipes = [os.pipe() for _ in range(num_workers)]
        start = MaskStart(
            model_path=str(model_path),
            vocab_size=vocab_size,
            end_ids=self.end_ids,
            num_rows=num_rows,
            stays_awake=stays_awake,
            memory_fd=self._memory_fd,
            order_fds=[fd for fd, _ in pipes],
            report_fd=their_report_fd,
            parent_pid=os.getpid(),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(start).decode()],
            pass_fds=(self._memory_fd, their_report_fd, *start.order_fds),
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OPENBLAS_NUM_THREADS": "1",  # threads are not there in processes that are forked
                "OMP_NUM_THREADS": "1",
            },
        )
        for fd in (their_report_fd, *start.order_fds):
            os.close(fd)
        self._report_fd = report_fd
        self._order_fds = [fd for _, fd in pipes]
        for fd in self._order_fds:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        sleep_exactly()  # so does `wait`
        weakref.finalize(self, _end, self._process, [self._memory_fd, report_fd, *self._order_fds])
        self._orders = [MaskOrders([], [], []) for _ in pipes]
        self._has_orders = np.zeros(num_workers, dtype=np.bool_)
        """Whether there is a message for a process."""
        self._has_tokens = np.zeros(num_workers, dtype=np.bool_)
        """Whether there is something new for it in the memory."""
        self._check_at = 0.0
        """The `time.perf_counter()` at which to look whether the processes are there."""
        self._encoder = msgspec.msgpack.Encoder()
        self._places = RowPlaces(num_rows, num_workers)
        self._num_words: int | None = None
        self.memory: mmap.mmap | None = None
        """The memory, once `wait_ready` has returned."""
        self._table = MaskTable.empty(num_rows, 0)

    def wait_ready(self) -> int:
        """Wait until the tokens are loaded, and return the words of a mask; 0: they cannot be loaded, and nothing may
        be asked for. Raises WorkerError."""
        if self._num_words is None:
            report = os.read(self._report_fd, 8)
            if len(report) < 8:
                self._fail()
            num_words: int = struct.unpack("q", report)[0]
            if num_words < 0:
                self._fail()
            self._num_words = num_words
            if self._num_words:
                self.memory = mmap.mmap(self._memory_fd, memory_bytes(self._num_rows, self._num_words))
                self._table = MaskTable.of(self.memory, self._num_rows, self._num_words)
        return self._num_words

    @property
    def answered(self) -> np.ndarray:
        """[rows], for each the last mask that is there (`mask_messages.answered`)."""
        return self._table.numbers

    def begin(self, grammar: str) -> int:
        """Begin an answer, and return its row. What is asked for goes out with `send`."""
        row = self._places.take(grammar)
        if self.memory is not None:
            self._of(row).begun.append(FollowGrammar(row, grammar))
        return row

    def end(self, row: int) -> None:
        """End the answer in a row."""
        if self.memory is not None:
            self._of(row).ended.append(row)
        self._places.give_back(row)

    def want(self, mask: WantMask) -> None:
        """Ask for a mask."""
        self._of(mask.row).wanted.append(mask)

    def want_next(self, rows: np.ndarray, numbers: np.ndarray, tokens: np.ndarray) -> None:
        """Ask for the masks of rows [n] by these numbers [n], each behind one of the tokens [n] and what the grammar
        allows. The last masks of these rows must be there."""
        self._table.next_tokens[rows] = next_token(numbers, tokens)
        self._has_tokens[rows % len(self._orders)] = True

    def send(self) -> None:
        """Send what was asked for. Raises WorkerError."""
        calls, is_asleep = self._table.calls, self._table.is_asleep
        if self._has_tokens.any():
            calls[: len(self._orders)] += self._has_tokens
            self._has_orders |= self._has_tokens & (is_asleep[: len(self._orders)] != 0)
            self._has_tokens[:] = False
        for number in np.flatnonzero(self._has_orders).tolist():
            message = self._encoder.encode(self._orders[number])
            self._orders[number] = MaskOrders([], [], [])
            self._write(self._order_fds[number], struct.pack("I", len(message)) + message)
            calls[number] += 1
        self._has_orders[:] = False

    def wait(self, rows: np.ndarray, wanted: np.ndarray, num_rows: int, patience: Patience | None) -> None:
        """Wait until `answered` has reached `wanted` [n] in `rows` [n]. With patience some may be late, but not all
        of the `num_rows` rows of the step. Raises WorkerError."""
        started = time.perf_counter()
        while num_late := int((self.answered[rows] < wanted).sum()):
            now = time.perf_counter()
            if now >= self._check_at:
                self._check_at = now + _CHECK_SECONDS
                self._check()
            if patience is not None and num_late < num_rows and now >= patience.ends_at(num_late, num_rows):
                return
            time.sleep(_LOOK_SECONDS if now > started + _EAGER_SECONDS else 0.0)

    def _of(self, row: int) -> MaskOrders:
        """Return the orders of a row's process, which will be sent."""
        number = row % len(self._orders)
        self._has_orders[number] = True
        return self._orders[number]

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except BrokenPipeError:
            self._check(_END_SECONDS)
            raise

    def _check(self, seconds: float = 0.0) -> None:
        """Raise WorkerError if a process has failed, or does so within some seconds."""
        if select.select([self._report_fd], [], [], seconds)[0]:
            self._fail()

    def _fail(self) -> NoReturn:
        report = b""
        while part := os.read(self._report_fd, 4096):
            report += part
        traceback = report.decode(errors="replace")
        reason = traceback.strip().rpartition("\n")[2] if traceback else "it was killed, or cannot start"
        raise WorkerError(f"a process that makes the masks of structured answers has failed: {reason}", traceback)


def _end(process: subprocess.Popen[bytes], fds: Sequence[int]) -> None:
    """End the processes. They do so by themselves once there is nothing to read."""
    for fd in fds:
        os.close(fd)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
