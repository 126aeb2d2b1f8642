"""A process that makes masks for a rank: it follows the answers of some rows, takes their tokens in, makes their masks
one by one, and writes them into memory that the rank sees. `mask_processes.py` starts it.

Masks that are likely to be slow, because the last one of the answer was, come behind the others. While one is slow, a
second thread goes on with the others, those included that are asked for meanwhile: llguidance lets it. A process may
end in the middle of an answer whose grammar takes too much stack or memory. So it writes down what its threads are at,
and what it is asked for of an answer at which another process has ended, it does while both threads do nothing else.
This module knows no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from nvcli.grammars import Vocabulary
from nvcli.runner.compiled_grammars import CompiledGrammars, GrammarAnswer
from nvcli.runner.mask_messages import (
    BEGINS,
    FIRST_THREAD,
    SECOND_THREAD,
    FollowGrammar,
    MaskOrders,
    MaskTable,
    WantMask,
    answered,
    read_next_token,
)

_ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that forbids nothing."""
_SLOW_SECONDS = 200e-6
_MOST_PASSED = 2
"""A slow mask is put off for this many orders at the most."""
_HELP_SECONDS = 150e-6
"""The time after which the second thread looks whether the first one is at a slow mask."""
_STUCK_SECONDS = 100e-6
"""The time that a mask takes when the second thread goes on with those behind it; 98 of 100 take less."""
_LOOK_SECONDS = 100e-6
"""How often a process looks for orders at first. To be woken by a timer so often takes some of a core: a third with 50
µs in a virtual machine."""
_LOOKS_AT_CALLS = 16
"""Of so many looks but one are at `MaskTable.calls` alone. The one is for processors that show the rank's writes in
another order."""
_AWAKE_SECONDS = 6e-3
"""The time after which it falls asleep. Steps that take longer lose little while the processes are woken."""
_NAP_MILLISECONDS = 200.0
"""How often a process that is asleep looks for orders without a message, which may be missing only where the rank saw
it awake at the very moment at which it fell asleep."""


@dataclass(slots=True)
class _Lane:
    """What one of the threads does."""

    number: int
    row: int | None = None
    """The row whose mask it makes; None: it makes none."""
    begun_at: float = 0.0
    """The `time.perf_counter()` at which it began that."""


class MaskWorker:
    """Makes the masks of some rows."""

    def __init__(self, vocabulary: Vocabulary, table: MaskTable, *, first: int = 0, step: int = 1) -> None:
        """`table` is the memory; each `step`-th row of it from the row `first` on is this worker's."""
        self._grammars = CompiledGrammars(vocabulary)
        self._text_end_bits = _bits(vocabulary.text_end_ids)
        self._numbers, self._masks = table.numbers, table.masks
        self._address, self._stride = table.masks.ctypes.data, table.masks.strides[0]
        self._first, self._step = first, step
        self.is_asleep = table.is_asleep[first : first + 1]
        """[1], as in `MaskTable`."""
        self._calls = table.calls[first : first + 1]
        self._calls_seen = 0
        self._next_tokens = table.next_tokens[first::step]
        self._read_tokens = np.zeros_like(self._next_tokens)
        """What was read of them last."""
        self._answers: dict[int, GrammarAnswer] = {}
        self._slow_rows: set[int] = set()
        self._fast: deque[WantMask] = deque()
        self._slow: deque[WantMask] = deque()
        self._num_passed = 0
        """Orders that have come since the first of the slow masks."""
        self._first_lane, self._second_lane = _Lane(FIRST_THREAD), _Lane(SECOND_THREAD)
        self._at_work = [memoryview(part) for part in table.at_work]
        self._suspects: set[int] = set()
        """Rows whose answers are worked on alone."""
        self._has_work = threading.Event()
        self._picking = threading.Lock()
        """Held while a thread picks a mask to make, and while masks are dropped."""

    def was_called(self) -> bool:
        """Tell whether `MaskTable.calls` says that there is something new, once for each time."""
        calls = int(self._calls[0])
        was_called, self._calls_seen = calls != self._calls_seen, calls
        return was_called

    def take(self, orders: MaskOrders) -> None:
        """Note what is to be done. One thread at a time may call this and `take_next_tokens`."""
        has_tokens = self.take_next_tokens()  # of answers that these orders may end
        if orders.ended or orders.begun:
            self._change_answers(orders)
        if orders.wanted and not has_tokens:
            self._put_off_slow_ones()
        for want in orders.wanted:
            self._queue(want)
        self._has_work.set()

    def take_next_tokens(self) -> bool:
        """Note what is to be done by `MaskTable.next_tokens`, and return whether something is new there."""
        next_tokens = self._next_tokens.copy()
        places = np.flatnonzero(next_tokens != self._read_tokens)
        if not len(places):
            return False
        self._put_off_slow_ones()
        for place in places.tolist():
            number, token = read_next_token(int(next_tokens[place]))
            row = self._first + place * self._step
            self._queue(WantMask(row, number, [token], is_free=False, held_back=[], opening=None, is_opened=False))
        self._read_tokens = next_tokens
        self._has_work.set()
        return True

    def _put_off_slow_ones(self) -> None:
        if self._slow:
            self._num_passed += 1

    def _queue(self, want: WantMask) -> None:
        (self._slow if want.row in self._slow_rows else self._fast).append(want)

    def _change_answers(self, orders: MaskOrders) -> None:
        gone = {*orders.ended, *(new.row for new in orders.begun)}
        with self._picking:
            self._fast = deque(want for want in self._fast if want.row not in gone)
            self._slow = deque(want for want in self._slow if want.row not in gone)
        while {self._first_lane.row, self._second_lane.row} & gone:  # a mask of one that has ended
            time.sleep(_HELP_SECONDS)
        for row in gone & self._answers.keys():
            self._answers.pop(row).end()
        for new in {new.row: new for new in orders.begun}.values():  # the last of a row's: others began and ended
            self._begin(new)

    def _begin(self, new: FollowGrammar) -> None:
        self._slow_rows.discard(new.row)
        self._suspects.discard(new.row)
        with contextlib.ExitStack() as stack:
            if new.is_suspect:
                self._suspects.add(new.row)
                stack.enter_context(self._picking)
                self._wait_for_others(None)
            self._at_work[BEGINS][self._first] = new.row + 1
            self._answers[new.row] = GrammarAnswer(new.grammar, self._grammars)
            self._at_work[BEGINS][self._first] = 0

    def _wait_for_others(self, own: _Lane | None) -> None:
        """Wait until no thread makes a mask, but for the one that calls this. It holds `_picking`."""
        while any(lane.row is not None for lane in (self._first_lane, self._second_lane) if lane is not own):
            time.sleep(_HELP_SECONDS)

    def next_is_urgent(self) -> bool:
        """Whether the next mask is to be made before new orders are looked for."""
        return bool(self._fast) or self._num_passed >= _MOST_PASSED

    @property
    def is_idle(self) -> bool:
        return not self._fast and not self._slow

    def make_next(self) -> None:
        """Make one mask, if there is one to be made."""
        self._make_one(self._first_lane, may_be_slow=True)

    def help_for_ever(self, orders: OrderReader) -> None:
        """Be the second thread."""
        while True:
            self._has_work.wait()
            time.sleep(_HELP_SECONDS)
            while self._is_stuck():
                if not self._help() and not orders.take_some(self):
                    time.sleep(_LOOK_SECONDS)
            if self.is_idle and self._first_lane.row is None:
                self._has_work.clear()
                if not self.is_idle:  # there are new orders
                    self._has_work.set()

    def _is_stuck(self) -> bool:
        """Whether the first thread is at a slow mask."""
        lane = self._first_lane
        return lane.row is not None and time.perf_counter() - lane.begun_at > _STUCK_SECONDS

    def _help(self) -> bool:
        """Make one mask of those that are likely to be fast, and return whether there was one."""
        return self._make_one(self._second_lane, may_be_slow=False)

    def _make_one(self, lane: _Lane, *, may_be_slow: bool) -> bool:
        with self._picking:
            if may_be_slow and self._slow and (not self._fast or self._num_passed >= _MOST_PASSED):
                want = self._slow.popleft()
                self._num_passed = 0
            elif self._fast:
                want = self._fast.popleft()
            else:
                return False
            lane.begun_at = time.perf_counter()
            lane.row = want.row
            is_suspect = want.row in self._suspects
            if is_suspect:
                self._wait_for_others(lane)
                self._answer(want, lane)
        if not is_suspect:
            self._answer(want, lane)
        lane.row = None
        return True

    def _answer(self, want: WantMask, lane: _Lane) -> None:
        answer, at_work = self._answers[want.row], self._at_work[lane.number]
        at_work[self._first] = want.row + 1
        self._make(want, answer)
        self._numbers[want.row] = answered(want.number, has_failed=answer.has_failed)
        at_work[self._first] = 0
        if time.perf_counter() - lane.begun_at > _SLOW_SECONDS:
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
            elif self._text_end_bits and not answer.may_end:
                _hold_back(self._masks[want.row], self._text_end_bits)
            if want.opening is not None:
                _let_open(self._masks[want.row], want.opening, is_only=want.is_opened)
        if want.held_back:
            _hold_back(self._masks[want.row], _bits(want.held_back))


def _let_open(mask: np.ndarray, token: int, *, is_only: bool) -> None:
    """Allow a token in a mask of uint32 words, in place, or this token alone."""
    if is_only:
        mask[:] = 0
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def _bits(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the word of each token in a mask, and its bit there."""
    return [(token >> 5, 1 << (token & 31)) for token in token_ids]


def _hold_back(mask: np.ndarray, bits: Sequence[tuple[int, int]]) -> None:
    """Forbid the tokens of `bits` in a mask of uint32 words, in place, unless it allows no others."""
    allowed = [(word, bit) for word, bit in bits if mask.item(word) & bit]
    for word, bit in allowed:
        mask[word] &= np.uint32(~bit & 0xFFFFFFFF)
    if allowed and not mask.any():
        for word, bit in allowed:
            mask[word] |= np.uint32(bit)


class OrderReader:
    """Reads what the rank asks for."""

    def __init__(self, fd: int, *, stays_awake: bool) -> None:
        self._fd = fd
        self._awake_seconds = _AWAKE_SECONDS if stays_awake else 0.0
        self._decoder = msgspec.msgpack.Decoder(MaskOrders)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._lock = threading.Lock()
        """Held by the thread that reads, until the worker has taken the orders."""

    def take_next(self, worker: MaskWorker) -> bool:
        """Wait for orders, unless the worker has got some from the other thread. Returns False when the rank is
        gone."""
        with self._lock:
            return not worker.is_idle or self._wait(worker)

    def take_some(self, worker: MaskWorker) -> bool:
        """Take orders if there are some and no other thread is at it, and return whether there were any."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return worker.take_next_tokens() or (bool(self._poll.poll(0)) and self._take(worker))
        finally:
            self._lock.release()

    def _wait(self, worker: MaskWorker) -> bool:
        """Wait for orders, at first with many looks at the memory: messages to all processes, one after the other, take
        the rank longer than a look takes to come."""
        awake_until = time.perf_counter() + self._awake_seconds
        try:
            for count in itertools.count():
                is_asleep = bool(worker.is_asleep[0])
                if worker.was_called() or is_asleep or count % _LOOKS_AT_CALLS == 0:
                    if worker.take_next_tokens():
                        return True
                    if self._poll.poll(_NAP_MILLISECONDS if is_asleep else 0):
                        return self._take(worker)
                if time.perf_counter() < awake_until:
                    time.sleep(_LOOK_SECONDS)
                else:
                    worker.is_asleep[0] = True  # and look once more: the rank may not have seen it
        finally:
            worker.is_asleep[0] = False
        raise AssertionError("it looks for ever")

    def _take(self, worker: MaskWorker) -> bool:
        size = _read(self._fd, 4)
        if size:
            worker.take(self._decoder.decode(_read(self._fd, *struct.unpack("I", size))))
        return bool(size)


def serve(worker: MaskWorker, orders: OrderReader) -> None:
    """Do what is asked for until the rank is gone."""
    while True:
        if worker.is_idle:
            if not orders.take_next(worker):
                return
        elif worker.next_is_urgent() or not orders.take_some(worker):
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
