"""MaskWorkers: the rank's side of the mask workers (`mask_worker.py`).

A mask takes about ten microseconds; one in a hundred takes a millisecond or more, and there is no telling which. A step
requests the masks of its rows, and waits for them while that costs less than leaving the late rows out (`Patience`). An
answer stays with its worker (`MaskRowAllocator`). A worker handles requests in order, so a row can be reassigned
without waiting.

A worker that dies is replaced, and its answers are followed from the beginning. The answer it was working on fails if
the replacement dies on it too.

The workers end with the rank, because their pipes close.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np

from nvcli.core.system.process_control import sleep_exactly
from nvcli.errors import WorkerError
from nvcli.worker.masks.mask_messages import (
    Ended,
    Loaded,
    MaskOrders,
    MaskStart,
    MaskTable,
    Raised,
    Report,
    WantMask,
    memory_bytes,
    next_token,
)
from nvcli.worker.masks.mask_patience import Patience
from nvcli.worker.masks.mask_rows import MaskRowAllocator

_MODULE = "nvcli.worker.masks.mask_processes"
_PIPE_BYTES = 1 << 20
"""Bytes of orders that a worker may have unread. Beyond that, or where the system allows no pipe this large, the rank
waits."""
_LOOK_SECONDS = 50e-6
"""Seconds between a step's polls for masks, after an initial busy wait."""
_EAGER_SECONDS = 200e-6
_CHECK_SECONDS = 0.1
"""Seconds between checks, in waiting steps, that the workers are alive."""
_END_SECONDS = 5.0
_MOST_IDLE_ENDS = 3
"""Deaths of one worker, each while idle and before it built a mask, after which the run ends."""
_MAX_REPORT = 1 << 16
_FAILED = "a process that makes the masks of structured answers"


class MaskWorkers:
    """The workers and the mask memory of one rank."""

    def __init__(self, start: MaskStart) -> None:
        """Begin to start the workers, which load the model's tokens."""
        num_workers = start.num_workers
        self.end_ids, self._num_rows = start.end_ids, start.num_rows
        self._memory_fd = os.memfd_create("nvcli-masks")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = self._memory_fd, theirs.fileno()
        arguments = [msgspec.json.encode(start).decode(), *map(str, fds), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()
        self._order_fds: list[int] = []
        weakref.finalize(self, _end, self._process, self._socket, self._memory_fd, self._order_fds)
        self._order_fds += [self._start(number) for number in range(num_workers)]
        sleep_exactly()  # so does `wait`
        self._orders = [MaskOrders([], [], []) for _ in range(num_workers)]
        self._has_orders = np.zeros(num_workers, dtype=np.bool_)
        """Whether there is a message for each worker."""
        self._has_tokens = np.zeros(num_workers, dtype=np.bool_)
        """Whether there are new requests for each worker in the memory."""
        self._check_at = 0.0
        """The `time.perf_counter()` at which to check next that the workers are alive."""
        self._ends: dict[int, str] = {}
        """Worker → how it died."""
        self._tracebacks: dict[int, str] = {}
        """Worker → the traceback of the exception that ended it."""
        self._num_idle_ends = [0] * num_workers
        """Worker → its deaths while idle, since it last built a mask."""
        self._num_made = [0] * num_workers
        """Worker → the sum of its `MaskTable.numbers` when it last died."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._rows = MaskRowAllocator(start.num_rows, num_workers)
        self._num_words: int | None = None
        """The words of a mask, once the tokens are loaded; 0: they cannot be."""
        self.table = MaskTable.empty(start.num_rows, 0)
        """The memory in which the workers write; no masks until `wait_ready` has returned."""

    def wait_ready(self) -> MaskTable | None:
        """Wait until the tokens are loaded, and return the table of the masks. None: the tokens cannot be loaded, and
        nothing may be requested. Raises WorkerError."""
        if self._num_words is None:
            self._check(None)
            assert self._num_words is not None, "that is told first"
            if self._num_words:
                memory = mmap.mmap(self._memory_fd, memory_bytes(self._num_rows, self._num_words))
                self.table = MaskTable.of(memory, self._num_rows, self._num_words)
        return self.table if self._num_words else None

    def begin(self, grammar: str) -> int:
        """Begin an answer, and return its row. `send` sends its orders."""
        follow = self._rows.take(grammar)
        if self._num_words:
            self._of(follow.row).begun.append(follow)
        return follow.row

    def end(self, row: int) -> None:
        """End the answer in a row."""
        if self._num_words:
            self._of(row).ended.append(row)
        self._rows.give_back(row)

    def want(self, mask: WantMask) -> None:
        """Request a mask."""
        self._of(mask.row).wanted.append(mask)

    def want_next(self, rows: np.ndarray, numbers: np.ndarray, tokens: np.ndarray) -> None:
        """Request the masks of rows [n] with these numbers [n], each after one of the tokens [n] and restricted by the
        grammar alone. The rows' previous masks must be there."""
        self.table.next_tokens[rows] = next_token(numbers, tokens)
        self._has_tokens[rows % len(self._orders)] = True

    def send(self) -> None:
        """Send the pending requests. Raises WorkerError."""
        if self._has_tokens.any():
            self._has_orders |= self._has_tokens & (self.table.is_asleep[: len(self._orders)] != 0)
            self._has_tokens[:] = False
        for number in np.flatnonzero(self._has_orders).tolist():
            message = self._encoder.encode(self._orders[number])
            self._orders[number] = MaskOrders([], [], [])
            self._write(number, struct.pack("I", len(message)) + message)
        self._has_orders[:] = False

    def wait(self, rows: np.ndarray, wanted: np.ndarray, num_rows: int, patience: Patience | None) -> None:
        """Wait until `MaskTable.numbers` has reached `wanted` [n] in `rows` [n], or a worker has died (`ended`). With
        patience, some rows may be late, but not all `num_rows` of the step. Raises WorkerError."""
        started = time.perf_counter()
        while num_late := int((self.table.numbers[rows] < wanted).sum()):
            now = time.perf_counter()
            if now >= self._check_at:
                self._check_at = now + _CHECK_SECONDS
                self._check(0.0)
            if self._ends:
                return
            if patience is not None and num_late < num_rows and now >= patience.ends_at(num_late, num_rows):
                return
            time.sleep(_LOOK_SECONDS if now > started + _EAGER_SECONDS else 0.0)

    @property
    def ended(self) -> list[int]:
        """The workers that have died and were not replaced. Masks requested from them do not come."""
        return [*self._ends]

    def replace(self, number: int) -> tuple[list[int], str]:
        """Replace a worker that has died.

        Returns the rows of its answers, which start from the beginning and need all their tokens again, and how it
        died. Raises WorkerError if the worker keeps dying without an answer to blame.
        """
        how, traceback = self._ends.pop(number), self._tracebacks.pop(number, "")
        if traceback:
            how = f"failed: {traceback.strip().rpartition(chr(10))[2]}"
        num_workers = len(self._orders)
        begun, was_idle = self._rows.begin_anew(number, int(self.table.at_work[number]))
        num_made = int(self.table.numbers[number::num_workers].sum())
        if num_made != self._num_made[number] or not was_idle:
            self._num_idle_ends[number] = 0
        self._num_made[number] = num_made
        self._num_idle_ends[number] += was_idle
        if self._num_idle_ends[number] >= _MOST_IDLE_ENDS:
            raise WorkerError(f"{_FAILED} {how}, {_MOST_IDLE_ENDS} times in a row", traceback)
        self.table.at_work[number] = 0
        self.table.next_tokens[number::num_workers] = 0
        os.close(self._order_fds[number])
        self._order_fds[number] = self._start(number)
        self._orders[number] = MaskOrders([], begun, [])
        self._has_orders[number] = True
        return [follow.row for follow in begun], how

    def _start(self, number: int) -> int:
        """Have the first process fork a worker. Returns the descriptor to which its orders are written."""
        theirs, ours = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with contextlib.suppress(OSError):  # it has ended, and `_check` reports that
            socket.send_fds(self._socket, [struct.pack("q", number)], [theirs])
        os.close(theirs)
        return ours

    def _of(self, row: int) -> MaskOrders:
        """Return the pending orders of a row's worker."""
        number = row % len(self._orders)
        self._has_orders[number] = True
        return self._orders[number]

    def _write(self, number: int, data: bytes) -> None:
        """Write a worker's orders. They are lost if it has died."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._order_fds[number], view) :]
        except BrokenPipeError:
            deadline = time.monotonic() + _END_SECONDS
            while number not in self._ends:
                if time.monotonic() > deadline:
                    raise WorkerError(f"{_FAILED} has closed its connection but still runs") from None
                self._check(_CHECK_SECONDS)

    def _receive(self) -> bytes:
        """Return a report; empty if there will be no more."""
        for _ in range(2):  # asked for a worker that ended before it heard that: its end is reported first
            with contextlib.suppress(ConnectionResetError):
                return self._socket.recv(_MAX_REPORT)
        return b""

    def _check(self, seconds: float | None) -> None:
        """Take the reports that have arrived or arrive within some seconds (None: wait for one). Raises WorkerError if
        there will be no more."""
        while select.select([self._socket], [], [], seconds)[0]:
            seconds = 0.0
            data = self._receive()
            match self._decoder.decode(data) if data else None:
                case Loaded(num_words):
                    self._num_words = num_words
                    if not num_words:
                        return  # nothing follows
                case Ended(number, how):
                    self._ends[number] = how
                case Raised(None, traceback):
                    raise WorkerError(f"{_FAILED} failed: {traceback.strip().rpartition(chr(10))[2]}", traceback)
                case Raised(int(number), traceback):
                    self._tracebacks[number] = traceback
                case None:
                    raise WorkerError(f"{_FAILED} was killed or could not start")


def _end(process: subprocess.Popen[bytes], report: socket.socket, memory_fd: int, order_fds: Sequence[int]) -> None:
    """End the workers, which exit by themselves once there is nothing to read."""
    report.close()
    for fd in (memory_fd, *order_fds):
        os.close(fd)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
