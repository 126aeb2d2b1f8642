"""Reads and tokenizes ahead of the engine, in a background thread, within bounds of rows and bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from nvcli.jobs.job import JobResult
from nvcli.jobs.reader import RowReader
from nvcli.pipeline.prepare import ModelLimits, PreparedRow, prepare
from nvcli.pipeline.tokenizer import Tokenizer

MAX_BYTES_AHEAD = 64 * 1024 * 1024
"""Of prompt token ids that wait to be taken."""

Batch = list[PreparedRow | JobResult]


class Feeder:
    """The thread, and the queue between it and the pipeline.

    The tokenizer is loaded in the thread, before the first row is read; `tokenizer` may be used once a batch was taken.
    """

    def __init__(
        self, reader: RowReader, load_tokenizer: Callable[[], Tokenizer], limits: ModelLimits, *, max_rows_ahead: int
    ) -> None:
        self._reader = reader
        self._load_tokenizer = load_tokenizer
        self._limits = limits
        self._max_rows_ahead = max_rows_ahead
        self._tokenizer: Tokenizer | None = None
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._rows_ahead = 0
        self._bytes_ahead = 0
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None
        self.load_seconds = 0.0
        self.busy_seconds = 0.0
        """Reading, parsing and tokenizing, without waiting for the pipeline (but with waiting for the input)."""
        # A daemon: a read of standard input can wait for ever, and must not keep an interrupted run from ending.
        self._thread = threading.Thread(target=self._run, name="nvcli-feeder", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "no batch was taken yet"
        return self._tokenizer

    def start(self) -> None:
        self._thread.start()

    def take(self, timeout: float) -> Batch | None:
        """The next batch; None if none comes within `timeout` seconds, or ever (`ended`)."""
        with self._changed:
            if not self._batches and timeout > 0 and not self._ended:
                self._changed.wait(timeout)
            if not self._batches:
                return None
            batch = self._batches.popleft()
            self._rows_ahead -= len(batch)
            self._bytes_ahead -= _num_bytes(batch)
            self._changed.notify_all()
            return batch

    @property
    def ended(self) -> bool:
        """No batch is left and none will come."""
        with self._changed:
            return self._ended and not self._batches

    @property
    def all_read(self) -> bool:
        """The input is read to its end; batches may be left."""
        return self._ended and self._error is None

    def raise_error(self) -> None:
        """Raise what ended the reading early, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Read no more. Does not wait: the thread may be in the middle of a read."""
        with self._changed:
            self._stopped = True
            self._batches.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            started = time.perf_counter()
            self._tokenizer = self._load_tokenizer()
            self.load_seconds = time.perf_counter() - started
            mark = time.perf_counter()
            for rows in self._reader.batches():
                batch = prepare(rows, self._tokenizer, self._limits)
                self.busy_seconds += time.perf_counter() - mark
                if not self._put(batch):
                    return
                mark = time.perf_counter()
        except BaseException as error:  # handed over: it belongs to whoever waits for rows
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, batch: Batch) -> bool:
        """Wait for room, then hand over; False if nobody wants more."""
        with self._changed:
            while not self._stopped and self._batches and self._is_full():
                self._changed.wait()
            if self._stopped:
                return False
            self._batches.append(batch)
            self._rows_ahead += len(batch)
            self._bytes_ahead += _num_bytes(batch)
            self._changed.notify_all()
            return True

    def _is_full(self) -> bool:
        return self._rows_ahead >= self._max_rows_ahead or self._bytes_ahead >= MAX_BYTES_AHEAD


def _num_bytes(batch: Batch) -> int:
    return sum(len(row.prompt_ids) for row in batch if isinstance(row, PreparedRow))
