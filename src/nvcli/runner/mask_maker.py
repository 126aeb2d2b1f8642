"""MaskMaker: the masks of constrained answers, made by threads of their own while the rank goes on.

A mask takes some ten microseconds; one in a hundred takes a millisecond or more, and nobody knows which before. The
threads therefore take a few answers at a time from one queue, so that few wait behind a slow one; answers whose last
masks were slow are made alone, and last. llguidance lets other Python threads run meanwhile.

A step waits for its masks as long as that costs less than to leave the late rows out of it (`Patience`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from nvcli.grammars import Vocabulary
from nvcli.runner.followed_answer import FollowedAnswer

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MIN_THREADS, _MAX_THREADS = 2, 16
"""One thread alone would have all masks wait for a slow one."""
_LEAST_GROUP, _MAX_GROUP = 4, 16
"""The fewest and the most answers that a thread takes at a time."""
_GROUPS_PER_THREAD = 4
"""In a step with many answers each thread takes about so many groups of them."""
_SLOW_SECONDS, _SLOW_SECONDS_EACH = 200e-6, 40e-6
"""A group was slow that took longer than this, and for each of its answers this."""
_LOOK_SECONDS = 100e-6
"""How often a step looks whether late masks have come, once waiting for them costs time."""

_Group = Sequence[FollowedAnswer]


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


@dataclass(slots=True)
class _Progress:
    """What the threads have done, for the rank's main thread to wait for."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    """Its lock guards all that is here, and `FollowedAnswer.is_gone`. It is notified when nothing is in work."""
    num_in_work: int = 0
    """The answers that are in work, without those that are gone."""
    failure: BaseException | None = None
    """The error that ended a thread."""

    def finish(self, group: _Group) -> None:
        with self.changed:
            for answer in group:
                answer.is_ready, answer.is_in_work = True, False
                self.num_in_work -= not answer.is_gone
            if not self.num_in_work:
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()


class MaskMaker:
    """Makes masks into the rows of one array."""

    def __init__(self, vocabulary: Vocabulary, masks: np.ndarray, *, num_cores: int) -> None:
        """masks: [rows, W] uint32, which stays where it is. `num_cores`: the cores that this rank may use, most of
        which get a thread."""
        self._num_threads = min(_MAX_THREADS, max(_MIN_THREADS, num_cores * 3 // 4))
        self._groups: SimpleQueue[_Group | None] = SimpleQueue()
        self._progress = _Progress()
        for number in range(self._num_threads):
            threading.Thread(
                target=_work,
                args=(self._groups, self._progress, vocabulary, masks),
                name=f"make-masks-{number}",
                daemon=True,
            ).start()
        weakref.finalize(self, _stop, self._groups, self._num_threads)

    def begin(self, answers: _Group) -> None:
        """Begin to make the masks of answers, none of which is in work."""
        for answer in answers:
            answer.is_in_work = True
        with self._progress.changed:
            self._progress.num_in_work += len(answers)
        fast = [answer for answer in answers if not answer.is_slow]
        size = min(_MAX_GROUP, max(_LEAST_GROUP, len(fast) // (_GROUPS_PER_THREAD * self._num_threads)))
        for first in range(0, len(fast), size):
            self._groups.put(fast[first : first + size])
        for answer in answers:
            if answer.is_slow:
                self._groups.put([answer])

    def abandon(self, answer: FollowedAnswer) -> None:
        """Note that nobody waits for an answer any longer. If it is in work, it stays so for a while."""
        with self._progress.changed:
            if answer.is_in_work and not answer.is_gone:
                answer.is_gone = True
                self._progress.num_in_work -= 1

    def wait(self, answers: _Group, num_rows: int, patience: Patience | None) -> None:
        """Wait for the masks of answers that are in work. With patience some of them may still be in work then, but not
        all that are among the `num_rows` rows of the step. Raises what ended a thread."""
        progress = self._progress
        while num_late := sum(answer.is_in_work for answer in answers):
            timeout = _LOOK_SECONDS
            if patience is not None:
                now = time.perf_counter()
                if num_late < num_rows and now >= patience.ends_at(num_late, num_rows):
                    return
                timeout = max(timeout, patience.free_until - now)
            with progress.changed:
                if progress.failure is not None:
                    raise progress.failure
                if progress.num_in_work or patience is None:
                    progress.changed.wait(timeout)


def _work(groups: SimpleQueue[_Group | None], progress: _Progress, vocabulary: Vocabulary, masks: np.ndarray) -> None:
    """Make the masks of groups until there is a None."""
    from llguidance import LLExecutor

    try:
        executor = LLExecutor(1)
        while (group := groups.get()) is not None:
            _make([answer for answer in group if not answer.is_gone], executor, vocabulary, masks)
            progress.finish(group)
    except BaseException as error:  # a panic of Rust code is no Exception
        progress.fail(error)


def _stop(groups: SimpleQueue[_Group | None], num_threads: int) -> None:
    for _ in range(num_threads):
        groups.put(None)


def _make(group: _Group, executor: LLExecutor, vocabulary: Vocabulary, masks: np.ndarray) -> None:
    """Make the masks of some answers, and note whether that took long."""
    started = time.perf_counter()
    going = []
    for answer in group:
        if answer.matcher is None or len(answer.unread) != 1:
            answer.read_tokens(vocabulary)
        else:
            going.append(answer)
    _read_one_each(going, executor, vocabulary)
    followed = [answer for answer in group if not answer.has_failed]
    _compute(followed, executor, masks)
    for answer in followed:
        if answer.has_met_error:
            answer.begin_anew(vocabulary)
            _compute([answer], executor, masks)
            answer.has_failed |= answer.has_met_error
    for answer in group:
        answer.finish_mask(masks)
    is_slow = time.perf_counter() - started > _SLOW_SECONDS + _SLOW_SECONDS_EACH * len(group)
    for answer in group:
        answer.is_slow = is_slow


def _read_one_each(answers: _Group, executor: LLExecutor, vocabulary: Vocabulary) -> None:
    """Let the matchers of answers that have one more token take it in."""
    pairs = [(answer.matcher, answer.unread[0]) for answer in answers if answer.matcher is not None]
    for answer, is_taken in zip(answers, executor.consume_token_par(pairs) if pairs else [], strict=True):
        answer.read.append(answer.unread.pop())
        if not is_taken:
            answer.begin_anew(vocabulary)


def _compute(answers: _Group, executor: LLExecutor, masks: np.ndarray) -> None:
    """Have llguidance write the masks of answers into their rows."""
    pairs = [(answer.matcher, answer.mask_row) for answer in answers if answer.matcher is not None]
    if pairs:
        executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))
