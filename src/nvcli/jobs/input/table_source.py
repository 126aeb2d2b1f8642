"""Tables that pyarrow reads as rows, a batch at a time: a column is a key. Needs pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.lib

from nvcli.errors import ConfigError
from nvcli.jobs.file_state import FileState
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.rows.raw_values import without_nulls

_BATCH_ROWS = 256
_BATCH_BYTES = 16 * 1024 * 1024
"""A batch has at most so many rows, and fewer where they would take more memory than that."""


class TableSource(ABC):
    """The rows of one file. Keys whose value is null are left out, in nested values too."""

    kind: str
    """The name of the format."""

    def __init__(self, path: Path, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        self._path = path
        self._known = known
        self.bytes_read = 0
        """The share of the file's bytes that belongs to the rows that were read."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""

    def place(self, number: int) -> str:
        """Return what messages call the place of the row that was yielded last, as the `number`-th."""
        return f"row {number}"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the rows.

        Raises OSError where the file cannot be read on, ConfigError where it is not of its format, and InputChanged
        where it is not what it was.
        """
        size = self._path.stat().st_size
        try:
            for batch, end in self.batches():
                self._check()
                # Values that a file holds once for many rows take their place in each row of the batch.
                step = rows_within(batch.nbytes // max(1, batch.num_rows))
                for start in range(0, batch.num_rows, step):
                    rows = _rows_of(batch.slice(start, step))
                    share = (start + len(rows)) / max(1, batch.num_rows)
                    self.bytes_read += int((end - self.bytes_read) * share)
                    yield from map(without_nulls, rows)
        except (pyarrow.lib.ArrowException, ValueError, OverflowError) as error:
            self._check()
            raise ConfigError(f"{self._path}: cannot be read as {self.kind}: {error}") from None
        self._check()
        self.bytes_read = size

    def _check(self) -> None:
        if self._known is None:
            return
        try:
            is_same = FileState.of(self._path) == self._known.state
        except OSError:
            is_same = False
        if not is_same:
            raise self._known.changed("another program wrote to it, removed it, or put another file in its place")


def rows_within(row_bytes: int) -> int:
    """Return how many rows of `row_bytes` make a batch."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a `RecordBatch` as Python objects."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows
