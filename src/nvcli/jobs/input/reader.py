"""The input as a stream of rows: files, standard input and tables, one after the other.

The reader holds one chunk and one batch at a time, whatever the size of the input. It never raises for what a row
holds; for an input that cannot be read to its end it raises ConfigError, after all rows before that place were given
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nvcli.errors import ConfigError, InputChanged
from nvcli.jobs.compression import CompressionError
from nvcli.jobs.files import STREAM
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.input.line_source import LineSource
from nvcli.jobs.job import Job, JobId, JobResult
from nvcli.jobs.own_files import is_parquet
from nvcli.jobs.row_set import AnsweredRows
from nvcli.jobs.rows.parser import Row, RowIdentity, RowParser
from nvcli.jobs.rows.row_digest import InputRows, row_digest
from nvcli.jobs.rows.row_warnings import RowWarnings

FIRST_BATCH_ROWS = 8
"""The first batch is small, so that replicas soon have work; batches double from here."""
MAX_BATCH_ROWS = 256
MAX_BATCH_BYTES = 4 * 1024 * 1024


class _Source(Protocol):
    """One input: its rows, and how many bytes of it were read."""

    @property
    def bytes_read(self) -> int: ...
    def lines(self) -> Iterator[Row | None]: ...


class RowDigests(Protocol):
    """Takes the digests of rows, which come in the order of their indices."""

    def wants(self, index: int) -> bool:
        """Tell whether the digest of a row is wanted, or there already."""

    def add(self, digest: bytes) -> None:
        """Take the digest of the next row that is wanted."""


class _Batch:
    """Rows that are given out together."""

    def __init__(self) -> None:
        self.rows: list[Job | JobResult] = []
        self._num_bytes = 0
        self._most_rows = FIRST_BATCH_ROWS

    def add(self, row: Job | JobResult, num_bytes: int) -> bool:
        """Add a row. Returns True if the batch is full with it; the next batch may then be larger."""
        self.rows.append(row)
        self._num_bytes += num_bytes
        if len(self.rows) < self._most_rows and self._num_bytes < MAX_BATCH_BYTES:
            return False
        self._most_rows = min(2 * self._most_rows, MAX_BATCH_ROWS)
        return True

    def take(self) -> list[Job | JobResult]:
        """Return the rows and begin a new batch."""
        rows, self.rows, self._num_bytes = self.rows, [], 0
        return rows


class RowReader:
    """Gives out the rows of all inputs that are not answered yet, once; counts what it has read."""

    def __init__(
        self,
        inputs: Sequence[str],
        parser: RowParser,
        *,
        limit: int | None = None,
        answered: AnsweredRows | None = None,
        known: Sequence[KnownInput] = (),
        digests: RowDigests | None = None,
    ) -> None:
        """Read at most `limit` rows. Rows that are `answered` are passed over; they count as read.

        `known` are inputs that must be what they were when the job began. `digests` takes the digests of rows before
        they are given out.
        """
        self._inputs = list(inputs)
        self._parser = parser
        self._limit = limit
        self._answered = answered or AnsweredRows()
        self._known = {each.name: each for each in known}
        self._digests = digests
        self._source: _Source | None = None
        self._line_number = 0
        """The number of the line that was read last, in its input; blank lines count."""
        self._bytes_before = 0
        self.rows_read = 0
        self.rows_passed_over = 0
        """Rows among `rows_read` that were answered already."""
        self.all_read = False
        """Whether every input was read to its end, and not just to the limit."""
        self.bytes_total = _total_bytes(self._inputs)
        """Bytes of all inputs as they are on disk; None: not known, as with standard input."""

    @property
    def warnings(self) -> RowWarnings:
        """What to tell the user of the rows that were read."""
        return self._parser.warnings

    @property
    def bytes_read(self) -> int:
        """Bytes that were read, as they are on disk. Another thread sees it a little behind or ahead at times."""
        source = self._source
        return self._bytes_before + (source.bytes_read if source is not None else 0)

    def batches(self) -> Iterator[list[Job | JobResult]]:
        """Yield the rows in order. A batch comes when it is full, and before a read that may have to wait.

        Raises ConfigError where an input cannot be read on, and InputChanged where it is not what it was.
        """
        batch = _Batch()
        for name in self._inputs:
            try:
                for row, num_bytes in self._rows(name):
                    is_due = batch.add(row, num_bytes) if row is not None else bool(batch.rows)
                    if is_due:
                        yield batch.take()
            except InputChanged:
                if batch.rows:
                    yield batch.take()
                raise
            except (OSError, CompressionError) as error:
                if batch.rows:
                    yield batch.take()
                raise self._broken_off(
                    name,
                    error,
                    "The rows up to there are answered; with a sound file in its place and --update the job goes on",
                ) from error
            if self._is_at_limit:
                break
        self.all_read = not self._is_at_limit
        if batch.rows:
            yield batch.take()

    def identify_quickly(self) -> InputRows | None:
        """Read all rows, whatever the limit, to find out which rows they are; none is given out.

        Returns None at the first row with an id that may be the name of a row without one: then it takes parsing to
        know which row has which name (`identify_all`). Raises as `batches` does.
        """
        rows = InputRows()
        for line, identity in self._identities(all_good=True):
            own_id = identity.own_id
            if isinstance(own_id, str) and own_id.startswith("row-"):
                return None
            rows.add(row_digest(line, own_id), name=identity.name, is_repeated=identity.is_repeated)
        return rows

    def identify_all(self) -> InputRows:
        """Do as `identify_quickly` does, and parse all rows for it."""
        rows = InputRows()
        for line, identity in self._identities(all_good=False):
            rows.add(row_digest(line, identity.own_id), name=identity.name, is_repeated=identity.is_repeated)
        return rows

    def _identities(self, *, all_good: bool) -> Iterator[tuple[Row, RowIdentity]]:
        for name in self._inputs:
            try:
                for line in self._lines(name):
                    if line is not None:
                        yield line, self._parser.identify(line, index=self.rows_read, is_good=all_good)
                        self.rows_read += 1
            except (OSError, CompressionError) as error:
                raise self._broken_off(name, error, "Put a sound file in its place") from error

    def _rows(self, name: str) -> Iterator[tuple[Job | JobResult | None, int]]:
        """Yield the rows of one input with the bytes of their lines, and None before a read that may have to wait."""
        for line in self._lines(name):
            if line is None:
                yield None, 0
                continue
            row = self._row(line, name)
            self.rows_read += 1
            if row is not None:
                yield row, len(line) if isinstance(line, bytes) else 0
            if self._is_at_limit:
                return

    def _lines(self, name: str) -> Iterator[Row | None]:
        """Yield the lines of one input that are rows, and None before a read that may have to wait."""
        source = self._source = _open_source(name, self._known.get(name))
        self._line_number = 0
        for line in source.lines():
            if line is None:
                yield None
                continue
            self._line_number += 1
            if not (isinstance(line, bytes) and (not line or line.isspace())):
                yield line
        self._bytes_before += source.bytes_read
        self._source = None

    def _broken_off(self, name: str, error: Exception, way_out: str) -> ConfigError:
        """Return the error that says how far an input could be read."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConfigError(f"{_label(name)}: cannot be read past line {self._line_number}: {reason}. {way_out}")

    @property
    def _is_at_limit(self) -> bool:
        return self._limit is not None and self.rows_read >= self._limit

    def _row(self, line: Row, name: str) -> Job | JobResult | None:
        """Parse one row; None for a row that is answered already."""
        index = self.rows_read
        if index in self._answered.all:
            passed_over = self._parser.identify(line, index=index, is_good=index not in self._answered.failed)
            self._note_digest(line, index, passed_over.own_id)
            self.rows_passed_over += 1
            return None
        where = f"{'row' if isinstance(line, dict) else 'line'} {self._line_number}"
        if len(self._inputs) > 1:
            where += f" of {_label(name)}"
        row = self._parser.parse(line, index=index, where=where)
        self._note_digest(line, index, None if row.place.is_named else row.place.id)
        return row

    def _note_digest(self, line: Row, index: int, own_id: JobId | None) -> None:
        if self._digests is not None and self._digests.wants(index):
            self._digests.add(row_digest(line, own_id))


def _open_source(name: str, known: KnownInput | None) -> _Source:
    if is_parquet(name):
        from nvcli.jobs.input.parquet_source import ParquetSource

        return ParquetSource(Path(name), known)
    return LineSource(name, known)


def _label(name: str) -> str:
    return "standard input" if name == STREAM else name


def _total_bytes(inputs: Sequence[str]) -> int | None:
    total = 0
    for name in inputs:
        path = Path(name)
        if name == STREAM or not path.is_file():
            return None
        total += path.stat().st_size
    return total
