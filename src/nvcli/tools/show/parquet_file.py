"""A Parquet output as lines of JSON. Needs pyarrow.

Rows at random, and the row with an id, are read from the row groups that hold them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet

from nvcli.errors import ConfigError, first_line
from nvcli.tools.show.answers import line_of

_BATCH_ROWS = 256


class ParquetFile:
    """The rows of one table."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> Iterator[bytes]:
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batch.validate(full=True)
                yield from map(line_of, batch.to_pylist())

    def lines_with(self, needles: Iterable[bytes]) -> Iterator[bytes]:
        wanted = list(needles)
        return (line for line in self.lines() if any(needle in line for needle in wanted))

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
        """Open the table, a `pyarrow.parquet.ParquetFile`. Raises ConfigError where it cannot be read as one."""
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                yield file
        except Exception as error:  # pyarrow has its own, and its values have those of their Python types
            raise ConfigError(f"{self._path}: cannot be read as Parquet: {first_line(error)}") from None
