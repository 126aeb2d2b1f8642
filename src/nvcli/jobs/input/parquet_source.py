"""Parquet files as rows: a column is a key. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet

from nvcli.jobs.input.table_rows import rows_within
from nvcli.jobs.input.table_source import TableSource

_READ_BYTES = 1024 * 1024
"""Bytes of each column that are read at a time; without such a bound pyarrow reads whole row groups."""


class ParquetSource(TableSource):
    """The rows of one Parquet file, once. Holds a batch of them at a time."""

    kind = "Parquet"

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""
        size = self._path.stat().st_size
        with pyarrow.parquet.ParquetFile(self._path, buffer_size=_READ_BYTES) as file:
            num_rows, num_read = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=rows_within(_largest_rows(file.metadata))):
                num_read += batch.num_rows
                yield batch, size * num_read // max(1, num_rows)


def _largest_rows(metadata: Any) -> int:
    """Return the mean bytes of a row in the row group with the largest rows, by a file's `FileMetaData`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
