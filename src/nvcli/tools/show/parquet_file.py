"""A Parquet output as lines of JSON. Needs pyarrow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet

from nvcli.errors import ConfigError, first_line
from nvcli.tools.show.answers import line_of
from nvcli.tools.show.output_file import OutputFile

_BATCH_ROWS = 256


class ParquetFile(OutputFile):
    """The rows of one table. A sample reads only the row groups that hold it."""

    def lines(self) -> Iterator[bytes]:
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batch.validate(full=True)
                yield from map(line_of, batch.to_pylist())

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        with self._opened() as file:
            num_rows = file.metadata.num_rows
            chosen = sorted(rng.sample(range(num_rows), min(count, num_rows)))
            lines: list[bytes] = []
            first = 0
            for number in range(file.num_row_groups):
                size = file.metadata.row_group(number).num_rows
                here = [index - first for index in chosen if first <= index < first + size]
                if here:
                    table = file.read_row_group(number)
                    table.validate(full=True)
                    lines += map(line_of, table.take(here).to_pylist())
                first += size
            return lines

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the table, a `pyarrow.parquet.ParquetFile`. Raises ConfigError if it cannot be read."""
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                yield file
        except Exception as error:  # pyarrow raises its own errors, and those of Python types
            raise ConfigError(f"{self._path}: cannot be read as Parquet: {first_line(error)}") from None
