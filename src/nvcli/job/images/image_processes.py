"""ImageProcesses: the image processes of a run, and the threads that wait for them."""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor

import msgspec

from nvcli.errors import RowError
from nvcli.job.images.image_process import PageCount, Prepared, Question
from nvcli.job.text.guarded_process import GuardedProcess, NoAnswer

_MAX_SECONDS = 30.0
"""Seconds for one image."""
_MAX_PROCESSES = 16
AHEAD = 2
"""Images of a batch of rows for each process."""


class ImageProcesses:
    """Up to one process for each core. Each starts when all before it are busy. Used by any number of threads."""

    def __init__(self) -> None:
        self.count = max(1, min(_MAX_PROCESSES, len(os.sched_getaffinity(0))))
        self.threads = ThreadPoolExecutor(AHEAD * self.count, thread_name_prefix="nvcli-images")
        """Threads in which to ask; they may also wait for servers."""
        self._idle: queue.LifoQueue[GuardedProcess] = queue.LifoQueue()
        self._processes = [
            GuardedProcess(
                "nvcli.job.images.image_process:main", None, name=f"image process {number}", max_seconds=_MAX_SECONDS
            )
            for number in range(self.count)
        ]
        for process in reversed(self._processes):
            self._idle.put(process)  # the first one is taken first, so that few images start few processes

    def ask(self, question: Question | PageCount) -> Prepared:
        """Ask an idle process. One that is ended instead of answering is a problem of the image; at the end of the run
        it is a RowError. Raises WorkerError if no process can be started."""
        process = self._idle.get()
        try:
            answer = process.ask(question)
        finally:
            self._idle.put(process)
        if not isinstance(answer, NoAnswer):
            return msgspec.msgpack.decode(answer, type=Prepared)
        if not answer.reason:
            raise RowError("aborted", "the run ends")
        return Prepared(problem=f"its process {answer.reason}")

    def close(self) -> None:
        """End the processes, even while they work. Idempotent."""
        for process in self._processes:
            process.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
