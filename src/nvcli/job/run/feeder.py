"""Reads and tokenizes rows ahead of the replicas, in a background thread, within bounds of rows and bytes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from nvcli.job.images.row_images import RowImages
from nvcli.job.job import Job, JobResult
from nvcli.job.run.counts import ReadTotals
from nvcli.job.run.several_prompts import split_rows
from nvcli.job.text.chat_renderer import ChatRenderer
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer

MAX_ROWS_AHEAD = 1024
MAX_BYTES_AHEAD = 16 * 1024 * 1024
"""Bounds on the rows that wait to be taken.

They are a buffer between two threads; the window in which rows are planned belongs to the loop. One batch more is in
the making; a batch is one row or at most 4 MiB of the input (`job.input.reader`).
"""

Batch = list[PreparedRow | JobResult]


def portions(rows: Sequence[Job | JobResult], images: RowImages | None) -> Iterator[Sequence[Job | JobResult]]:
    """Split a batch of rows into those that are prepared together: with a job for each prompt of a row, and few
    images."""
    for some in split_rows(rows):
        yield from (some,) if images is None else images.portions(some)


class RowSource(Protocol):
    """A source of parsed rows; `job.input.reader.RowReader` reads them from files."""

    def batches(self) -> Iterator[list[Job | JobResult]]:
        """Yield the rows in order, some at a time. Raises whatever ends the reading early."""


class Feeder:
    """The thread, and the queue between it and the loop.

    The tokenizer is loaded in the thread, before the first row is read; `tokenizer` may be used once a batch was taken.
    """

    def __init__(
        self,
        reader: RowSource,
        load_tokenizer: Callable[[], Tokenizer],
        limits: ModelLimits,
        chat_renderer: ChatRenderer,
        grammars: GrammarMaker | None = None,
        images: RowImages | None = None,
    ) -> None:
        """`chat_renderer`, `grammars` and `images` are closed when the last row is read, or by `stop`. With `grammars`
        None rows that ask for structured answers are refused, and with `images` None those that have images."""
        self._reader = reader
        self._load_tokenizer = load_tokenizer
        self._limits = limits
        self._chat_renderer = chat_renderer
        self._grammars = grammars
        self._images = images
        self._tokenizer: Tokenizer | None = None
        self._changed = threading.Condition()
        self._doorbell: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while batches wait, and after the last one."""
        self._batches: deque[tuple[Batch, int]] = deque()
        """Waiting batches, each with its bytes."""
        self._rows_ahead = 0
        self._bytes_ahead = 0
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None
        self.read = ReadTotals()
        """Totals of the rows prepared so far, including waiting ones."""
        self.load_seconds = 0.0
        self.read_seconds = 0.0
        """Time of reading and parsing, including waits for the input, but not for the loop."""
        self.tokenize_seconds = 0.0
        # A daemon: a read of standard input can wait forever, and must not keep an interrupted run from ending.
        self._thread = threading.Thread(target=self._run, name="nvcli-feeder", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "no batch was taken yet"
        return self._tokenizer

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Batch | None:
        """Return the next batch without waiting; None if there is none now, or none will come (`ended`)."""
        with self._changed:
            if not self._batches:
                return None
            batch, num_bytes = self._batches.popleft()
            self._rows_ahead -= len(batch)
            self._bytes_ahead -= num_bytes
            if not self._batches and not self._ended and self._doorbell is not None:
                os.eventfd_read(self._doorbell)
            self._changed.notify_all()
            return batch

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` or `ended` has news."""
        assert self._doorbell is not None, "the feeder is stopped"
        return self._doorbell

    @property
    def ended(self) -> bool:
        """Whether there are no more batches."""
        with self._changed:
            return self._ended and not self._batches

    @property
    def all_read(self) -> bool:
        """Whether the input is read to its end. Batches may be left."""
        return self._ended and self._error is None

    def raise_error(self) -> None:
        """Raise the error that ended the reading early, if any."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop reading. Does not wait for the thread, which may be in the middle of a read."""
        with self._changed:
            self._stopped = True
            self._batches.clear()
            if self._doorbell is not None:
                os.close(self._doorbell)
                self._doorbell = None
            self._changed.notify_all()
        self._close_processes()

    def _run(self) -> None:
        try:
            started = time.perf_counter()
            self._tokenizer = self._load_tokenizer()
            self.load_seconds = time.perf_counter() - started
            preparer = Preparer(self._tokenizer, self._limits, self._chat_renderer.render, self._grammars, self._images)
            mark = time.perf_counter()
            for rows in self._reader.batches():
                read = time.perf_counter()
                self.read_seconds += read - mark
                for some in portions(rows, self._images):
                    mark = time.perf_counter()
                    batch = preparer.prepare(some)
                    self.tokenize_seconds += time.perf_counter() - mark
                    if not self._put(batch):
                        return
                mark = time.perf_counter()
        except BaseException as error:  # handed over: it belongs to whoever waits for rows
            self._error = error
        finally:
            self._close_processes()
            with self._changed:
                self._ended = True
                self._ring()
                self._changed.notify_all()

    def _put(self, batch: Batch) -> bool:
        """Wait for room, then hand over the batch; False if the feeder is stopped."""
        num_bytes = 0
        for row in batch:
            if isinstance(row, PreparedRow):
                num_bytes += row.num_bytes
                self.read.add(row)
        with self._changed:
            while not self._stopped and self._batches and self._is_full():
                self._changed.wait()
            if self._stopped:
                return False
            if not self._batches:
                self._ring()
            self._batches.append((batch, num_bytes))
            self._rows_ahead += len(batch)
            self._bytes_ahead += num_bytes
            self._changed.notify_all()
            return True

    def _close_processes(self) -> None:
        self._chat_renderer.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._images is not None:
            self._images.close()

    def _ring(self) -> None:
        if self._doorbell is not None:
            os.eventfd_write(self._doorbell, 1)

    def _is_full(self) -> bool:
        return self._rows_ahead >= MAX_ROWS_AHEAD or self._bytes_ahead >= MAX_BYTES_AHEAD
