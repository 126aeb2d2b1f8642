"""Writes results as lines of the output: only whole lines, synced to disk within seconds.

Lines are gathered and handed to the system together: when a mebibyte has come, when the oldest has waited long enough
(`tick`) and at the end. With `order="input"` results wait for those before them, most of them in a file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from nvcli.errors import RowError, unexpected
from nvcli.job.job import JobResult, failed
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.sink import Sink
from nvcli.job.rows.output_row import OutputForm, output_row

FLUSH_BYTES = 1024 * 1024
SYNC_SECONDS = 2.0


class ResultWriter:
    """Encodes and orders results. Not thread-safe."""

    def __init__(
        self,
        sink: Sink,
        form: OutputForm | None = None,
        *,
        reorder: ReorderBuffer | None = None,
        sync_seconds: float = SYNC_SECONDS,
    ) -> None:
        """`reorder` restores the order of the input; None: rows are written as they come.

        `sync_seconds` is how long a row may take to the disk.
        """
        self._sink = sink
        self._form = form or OutputForm()
        self._encode = msgspec.json.Encoder().encode
        self._lines = bytearray()
        self._reorder = reorder
        # A little is left for the sync itself.
        self._flush_seconds = 0.75 * sync_seconds
        self._oldest_since = 0.0
        self._is_closed = False

    def write(self, results: Sequence[JobResult]) -> Sequence[JobResult]:
        """Take results, and write the lines that are due. Raises OutputError or OutputClosed.

        Returns the results as they were written: in the place of one of which no line can be made, its error.
        """
        written, reorder = results, self._reorder
        for number, result in enumerate(results):
            try:
                line = self._encode(output_row(result, self._form))
            except BaseException as error:
                result, line = self._failed(result, unexpected(error, "writing the answer"))
                written = [*written[:number], result, *written[number + 1 :]]
            if reorder is None:
                self._append(line)
            else:
                reorder.add(result.context.index, line)
        if reorder is not None:
            for line in reorder.take():
                self._append(line)
        return written

    def _failed(self, result: JobResult, error: RowError) -> tuple[JobResult, bytes]:
        """Return the error that replaces a result which cannot be encoded, and its line.

        The keys that the row passes through stay unless they are at fault.
        """
        result = failed(result.context, error)
        try:
            return result, self._encode(output_row(result, self._form))
        except Exception:
            result = failed(msgspec.structs.replace(result.context, extra={}), error)
            return result, self._encode(output_row(result, self._form))

    def tick(self) -> None:
        """Write and sync lines that have waited long enough. Call it often."""
        if self._lines and time.monotonic() - self._oldest_since >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, bytearray()
        if lines:
            self._sink.write(bytes(lines))
            self._sink.sync()

    def close(self) -> None:
        """Finish the output of a complete job: write what is left, and sync. Idempotent."""
        assert not self._reorder, "results are missing before those that wait for their turn"
        if not self._is_closed:
            self._sink.start()  # a job without rows has an output too
        self.close_early()

    def close_early(self) -> None:
        """End the output of an interrupted job: save what can be saved. Does nothing after `close`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.flush()
        finally:
            if self._reorder is not None:
                self._reorder.close()
            self._sink.close()

    def _append(self, line: bytes) -> None:
        if not self._lines:
            self._oldest_since = time.monotonic()
        self._lines += line
        self._lines += b"\n"
        if len(self._lines) >= FLUSH_BYTES:
            self.flush()
