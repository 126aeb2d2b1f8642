"""Call: one stream of rows on its way through the engines, and its results so far.

Three threads meet here. The reader adds rows, and waits while too many are in progress. The loop adds results. The
consumer takes them, which makes room. Once no one waits for a call any more it is `gone`, and its rows are no longer
computed.
"""

from __future__ import annotations

import copy
import threading
from collections import deque

from nvcli.core.config_types import Order
from nvcli.errors import NvcliError
from nvcli.job.job import JobResult

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""No more rows are read while about this many bytes of answers wait to be taken."""


class Call:
    """The rows of one call in progress, and the results waiting to be taken."""

    def __init__(self, *, order: Order, max_rows: int, seed: int | None = None, streams: bool = False) -> None:
        """`max_rows`: the most rows that are read and not yet taken. `seed` replaces the run's."""
        self.seed = seed
        self.streams = streams
        self.keeps_order = order == "input"
        self._max_rows = max_rows
        self._changed = threading.Condition()
        self._ready: deque[JobResult] = deque()
        self._early: dict[int, JobResult] = {}
        """Results waiting for those of earlier rows, by index."""
        self._next_index = 0
        self._ready_bytes = 0
        """Approximate size of the results waiting to be taken, in bytes."""
        self._num_open = 0
        """Rows that were read and whose results are not yet taken."""
        self._prompts: dict[int, str] = {}
        """The prompts of those rows, by index."""
        self._texts: deque[str] = deque()
        self._all_read = False
        self._is_gone = False
        self._input_error: BaseException | None = None
        self._failure: NvcliError | None = None

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    @property
    def is_waiting(self) -> bool:
        """Whether rows are still to be read or to be answered."""
        with self._changed:
            num_answered = len(self._ready) + len(self._early)
            return not self._is_over and (not self._all_read or self._num_open > num_answered)

    # The reader's side.

    def wait_for_room(self) -> bool:
        """Wait until another row may be read. Returns False if no more are wanted."""
        with self._changed:
            while not self._is_over and (
                self._num_open >= self._max_rows or (self._num_open and self._ready_bytes >= MAX_ANSWER_BYTES)
            ):
                self._changed.wait()
            return not self._is_over

    def add_row(self, index: int, prompt: str | None) -> None:
        """Record that a row was read; its result must follow. `prompt` is kept until then."""
        with self._changed:
            self._num_open += 1
            if prompt is not None and not self._is_gone:
                self._prompts[index] = prompt

    def end_input(self, error: BaseException | None) -> None:
        """Record that no more rows come, because of an error in the program's own rows if one is given."""
        with self._changed:
            self._all_read = True
            self._input_error = error
            self._changed.notify_all()

    # The loop's side.

    def take(self, result: JobResult) -> None:
        """Take in the result of a row."""
        with self._changed:
            if self._is_gone:
                return
            self._ready_bytes += self._num_bytes(result)
            if not self.keeps_order:
                self._ready.append(result)
            else:
                self._early[result.context.index] = result
                while (due := self._early.pop(self._next_index, None)) is not None:
                    self._ready.append(due)
                    self._next_index += 1
            self._changed.notify_all()

    def take_text(self, text: str) -> None:
        """Take in the next piece of text of a streaming call's answer."""
        with self._changed:
            self._texts.append(text)
            self._changed.notify_all()

    def fail(self, error: NvcliError) -> None:
        """Record that no more results come, because of this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # The consumer's side.

    def next(self) -> JobResult | str | None:
        """Wait for the next piece of text or result, and return it; None if there are no more.

        Raises the error of the engines or of the program's rows, once all results before it are taken.
        """
        with self._changed:
            while True:
                if self._is_gone:
                    return None
                if self._texts:
                    return self._texts.popleft()
                if self._ready:
                    result = self._ready.popleft()
                    self._num_open -= 1
                    self._ready_bytes -= self._num_bytes(result)
                    self._changed.notify_all()
                    return result
                if self._failure is not None:
                    raise copy.copy(self._failure)  # raising an exception again adds to its traceback
                if self._all_read and not self._num_open:
                    if self._input_error is not None:
                        error, self._input_error = self._input_error, None
                        raise error
                    return None
                self._changed.wait()

    def take_prompt(self, index: int) -> str | None:
        """Return the prompt of a result just taken, and forget it; None if it was not a text."""
        return self._prompts.pop(index, None)

    def leave(self) -> bool:
        """Stop waiting for results. Returns True if rows of the call may still be in progress. Idempotent."""
        with self._changed:
            was_open = not self._is_gone and (self._num_open > 0 or not self._all_read)
            self._is_gone = True
            self._ready.clear()
            self._early.clear()
            self._prompts.clear()
            self._texts.clear()
            self._changed.notify_all()
            return was_open

    def _num_bytes(self, result: JobResult) -> int:
        """Estimate the memory of a waiting result and its prompt, in bytes."""
        return result.num_bytes + len(self._prompts.get(result.context.index, ""))

    @property
    def _is_over(self) -> bool:
        return self._is_gone or self._failure is not None
