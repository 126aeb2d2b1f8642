"""Parquet files as rows: a column is a key. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.lib
import pyarrow.parquet

from nvcli.errors import ConfigError

_BATCH_ROWS = 256


class ParquetSource:
    """The rows of one file, read a batch at a time. Keys whose value is null are left out, in nested values too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        """The share of the file's bytes that belongs to the rows that were read."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the rows. Raises OSError where the file cannot be read on, ConfigError where it is no Parquet."""
        size = self._path.stat().st_size
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                num_rows = file.metadata.num_rows
                num_read = 0
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    num_read += batch.num_rows
                    self.bytes_read = size * num_read // num_rows
                    for row in batch.to_pylist():
                        yield _without_nulls(row)
        except (pyarrow.lib.ArrowException, ValueError, OverflowError) as error:
            raise ConfigError(f"{self._path}: cannot be read as Parquet: {error}") from None
        self.bytes_read = size


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
