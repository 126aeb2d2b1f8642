"""The processes that make masks for a rank. Masks are made in processes, because in threads of one process most of the
time would go into handing the interpreter from thread to thread.

The first process loads the model's tokens and forks the others, which share them. Each follows the answers of some
rows: it takes their tokens in, makes their masks one by one, and writes them into memory that the rank sees. Masks that
are likely to be slow, because the last one of the answer was, come behind the others. Where another one turns out to be
slow, a second thread goes on with those behind it: llguidance lets it. This module knows no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

from nvcli.grammars import GrammarError, Vocabulary
from nvcli.runner.compiled_grammars import CompiledGrammars, GrammarAnswer
from nvcli.runner.mask_messages import MaskOrders, MaskStart, WantMask, answered, masks_offset, memory_bytes

_PR_SET_PDEATHSIG = 1
_ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that forbids nothing."""
_SLOW_SECONDS = 200e-6
_MOST_PASSED = 2
"""A slow mask is put off for this many orders at the most."""
_HELP_SECONDS = 400e-6
"""The time after which the second thread looks whether the first one is at a slow mask."""
_MAX_REPORT = 3000


class MaskWorker:
    """Makes the masks of some rows."""

    def __init__(self, vocabulary: Vocabulary, numbers: np.ndarray, masks: np.ndarray) -> None:
        """numbers: [rows] int64 and masks: [rows, W] uint32 are the two parts of the memory."""
        self._grammars = CompiledGrammars(vocabulary)
        self._numbers, self._masks = numbers, masks
        self._address, self._stride = masks.ctypes.data, masks.strides[0]
        self._answers: dict[int, GrammarAnswer] = {}
        self._slow_rows: set[int] = set()
        self._fast: deque[WantMask] = deque()
        self._slow: deque[WantMask] = deque()
        self._num_passed = 0
        """Orders that have come since the first of the slow masks."""
        self._begun_at: float | None = None
        """The `time.perf_counter()` at which the first thread began the mask that it makes; None: it makes none."""
        self._has_work = threading.Event()
        self._helping = threading.Lock()
        """Held by the second thread while it makes a mask, and by the first one while answers come and go."""

    def take(self, orders: MaskOrders) -> None:
        """Note what is to be done."""
        if orders.ended or orders.begun:
            with self._helping:
                self._change_answers(orders)
        if self._slow:
            self._num_passed += 1
        for want in orders.wanted:
            (self._slow if want.row in self._slow_rows else self._fast).append(want)
        self._has_work.set()

    def _change_answers(self, orders: MaskOrders) -> None:
        gone = {*orders.ended, *(new.row for new in orders.begun)}
        self._fast = deque(want for want in self._fast if want.row not in gone)
        self._slow = deque(want for want in self._slow if want.row not in gone)
        for row in orders.ended:
            self._answers.pop(row, None)
        for new in orders.begun:
            self._answers[new.row] = GrammarAnswer(new.grammar, self._grammars)
            self._slow_rows.discard(new.row)

    def next_is_urgent(self) -> bool:
        """Whether the next mask is to be made before new orders are looked for."""
        return bool(self._fast) or self._num_passed >= _MOST_PASSED

    @property
    def is_idle(self) -> bool:
        return not self._fast and not self._slow

    def make_next(self) -> None:
        """Make one mask, if there is one to be made."""
        if self._slow and (not self._fast or self._num_passed >= _MOST_PASSED):
            want = self._slow.popleft()
            self._num_passed = 0
        else:
            try:
                want = self._fast.popleft()
            except IndexError:  # the other thread has it
                return
        self._begun_at = time.perf_counter()
        self._answer(want, self._begun_at)
        self._begun_at = None

    def help_for_ever(self) -> None:
        """Be the second thread."""
        while True:
            self._has_work.wait()
            time.sleep(_HELP_SECONDS)
            if not self._fast:
                self._has_work.clear()
            while self._help():
                pass

    def _help(self) -> bool:
        """Make one mask if the first thread is at a slow one; return whether there may be others."""
        with self._helping:
            begun_at = self._begun_at
            if not self._fast or begun_at is None or time.perf_counter() - begun_at < _SLOW_SECONDS:
                return False
            with contextlib.suppress(IndexError):  # the first thread was faster
                self._answer(self._fast.popleft(), time.perf_counter())
            return True

    def _answer(self, want: WantMask, started: float) -> None:
        answer = self._answers[want.row]
        self._make(want, answer)
        self._numbers[want.row] = answered(want.number, has_failed=answer.has_failed)
        if time.perf_counter() - started > _SLOW_SECONDS:
            self._slow_rows.add(want.row)
        else:
            self._slow_rows.discard(want.row)

    def _make(self, want: WantMask, answer: GrammarAnswer) -> None:
        if want.is_free:
            self._masks[want.row] = _ALL
        else:
            answer.write_mask(want.tokens, self._address + want.row * self._stride, self._stride)
            if answer.has_failed:
                self._masks[want.row] = _ALL
            if want.opening is not None:
                _let_open(self._masks[want.row], want.opening, is_only=want.is_opened)
        if want.held_back:
            _hold_back(self._masks[want.row], want.held_back)


def _let_open(mask: np.ndarray, token: int, *, is_only: bool) -> None:
    """Allow a token in a mask of uint32 words, in place, or this token alone."""
    if is_only:
        mask[:] = 0
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def _hold_back(mask: np.ndarray, token_ids: Sequence[int]) -> None:
    """Forbid tokens in a mask of uint32 words, in place, unless it allows no others."""
    held = np.zeros_like(mask)
    for token in token_ids:
        held[token >> 5] |= np.uint32(1 << (token & 31))
    left = mask & ~held
    if left.any():
        mask[:] = left


def serve(worker: MaskWorker, order_fd: int) -> None:
    """Do what is asked for until the rank is gone."""
    decoder = msgspec.msgpack.Decoder(MaskOrders)
    poll = select.poll()
    poll.register(order_fd, select.POLLIN)
    while True:
        if worker.is_idle or (not worker.next_is_urgent() and poll.poll(0)):
            size = _read(order_fd, 4)
            if not size:
                return
            worker.take(decoder.decode(_read(order_fd, *struct.unpack("I", size))))
        else:
            worker.make_next()


def _read(fd: int, size: int) -> bytes:
    """Read so many bytes; none at the end of the file."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def _work(start: MaskStart, order_fd: int, vocabulary: Vocabulary) -> None:
    """Be one of the processes, to its end."""
    code = 0
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(os.getppid(), signal.SIGKILL)
        memory = mmap.mmap(start.memory_fd, memory_bytes(start.num_rows, vocabulary.num_words))
        numbers = np.frombuffer(memory, dtype=np.int64, count=start.num_rows)
        masks = np.frombuffer(memory, dtype=np.uint32, offset=masks_offset(start.num_rows))
        for fd in start.order_fds:
            if fd != order_fd:
                os.close(fd)
        worker = MaskWorker(vocabulary, numbers, masks.reshape(start.num_rows, -1))
        threading.Thread(target=_help, args=(worker, start.report_fd), daemon=True).start()
        serve(worker, order_fd)
    except BaseException:  # a panic of Rust code is no Exception
        _report(start.report_fd)
        code = 1
    os._exit(code)


def _help(worker: MaskWorker, report_fd: int) -> None:
    try:
        worker.help_for_ever()
    except BaseException:
        _report(report_fd)
        os._exit(1)


def _report(report_fd: int) -> None:
    """Tell the rank, if it is still there, of the exception that is being handled."""
    with contextlib.suppress(OSError):
        os.write(report_fd, traceback.format_exc().encode()[-_MAX_REPORT:])


def _die_with(parent_pid: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os._exit(1)


def main() -> None:
    """Load the tokens, start the other processes, and wait until they have ended; if one fails, end all."""
    start = msgspec.json.decode(sys.argv[1], type=MaskStart)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pids: set[int] = set()

    def end(number: int, frame: FrameType | None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has just been waited for
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    _die_with(start.parent_pid, signal.SIGTERM)
    # The number of words comes before anything that a process reports.
    num_words = struct.pack("q", -1)
    try:
        try:
            vocabulary = Vocabulary.load(Path(start.model_path), vocab_size=start.vocab_size, end_ids=start.end_ids)
        except GrammarError:  # the file has changed since the parent read it: answers fail
            os.write(start.report_fd, struct.pack("q", 0))
            os._exit(0)
        os.ftruncate(start.memory_fd, memory_bytes(start.num_rows, vocabulary.num_words))
        os.write(start.report_fd, struct.pack("q", vocabulary.num_words))
        num_words = b""
        gc.freeze()
        for order_fd in start.order_fds:
            pid = os.fork()
            if pid == 0:
                _work(start, order_fd, vocabulary)
            pids.add(pid)
    except BaseException:  # a panic of Rust code is no Exception
        os.write(start.report_fd, num_words)
        _report(start.report_fd)
        end(signal.SIGTERM, None)
    for order_fd in start.order_fds:
        os.close(order_fd)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status:
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)


if __name__ == "__main__":
    main()
