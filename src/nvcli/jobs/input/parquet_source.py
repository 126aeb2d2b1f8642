"""Parquet files as rows: a column is a key. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.lib
import pyarrow.parquet

from nvcli.errors import ConfigError
from nvcli.jobs.file_state import FileState
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.rows.raw_values import without_nulls

_BATCH_ROWS = 256
_BATCH_BYTES = 16 * 1024 * 1024
"""A batch has at most so many rows, and fewer where they would take more memory than that."""
_READ_BYTES = 1024 * 1024
"""Bytes of each column that are read at a time; without such a bound pyarrow reads whole row groups."""


class ParquetSource:
    """The rows of one file, read a batch at a time. Keys whose value is null are left out, in nested values too."""

    def __init__(self, path: Path, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        self._path = path
        self._known = known
        self.bytes_read = 0
        """The share of the file's bytes that belongs to the rows that were read."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the rows.

        Raises OSError where the file cannot be read on, ConfigError where it is no Parquet, and InputChanged where it
        is not what it was.
        """
        size = self._path.stat().st_size
        try:
            with pyarrow.parquet.ParquetFile(self._path, buffer_size=_READ_BYTES) as file:
                num_rows = file.metadata.num_rows
                num_read = 0
                for batch in file.iter_batches(batch_size=_rows_within(_BATCH_BYTES, _largest_rows(file.metadata))):
                    self._check()
                    # Values that a file holds once for many rows take their place in each row of the batch.
                    step = _rows_within(_BATCH_BYTES, batch.nbytes // max(1, batch.num_rows))
                    for start in range(0, batch.num_rows, step):
                        rows = _rows_of(batch.slice(start, step))
                        num_read += len(rows)
                        self.bytes_read = size * num_read // num_rows
                        yield from map(without_nulls, rows)
        except (pyarrow.lib.ArrowException, ValueError, OverflowError) as error:
            self._check()
            raise ConfigError(f"{self._path}: cannot be read as Parquet: {error}") from None
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


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a `RecordBatch` as Python objects."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _largest_rows(metadata: Any) -> int:
    """Return the mean bytes of a row in the row group with the largest rows, by a file's `FileMetaData`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)


def _rows_within(num_bytes: int, row_bytes: int) -> int:
    """Return how many rows of `row_bytes` make a batch."""
    return max(1, min(_BATCH_ROWS, num_bytes // max(1, row_bytes)))
