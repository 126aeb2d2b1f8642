"""The inputs as a stream of rows: files of all formats and standard input, one after the other.

The reader holds one chunk and one batch at a time, whatever the size of the input. It never raises for what a row
holds; for an input that cannot be read to its end it raises ConfigError, after all rows before that place were given
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nvcli.errors import ConfigError, InputChanged, UnreadableInput, reworded, unexpected
from nvcli.job.compression import CompressionError
from nvcli.job.file_formats import input_format
from nvcli.job.files import STREAM
from nvcli.job.input.column_check import MAX_HELD_ROWS, ColumnsError, Fault, ReadRow, refusal, with_fault
from nvcli.job.input.known_input import KnownInput
from nvcli.job.input.line_source import DamagedInput, LineSource, Source, TextSource
from nvcli.job.input.pdf_source import PdfFile, PdfSource
from nvcli.job.job import Job, JobId, JobResult
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.parser import Row, RowParser
from nvcli.job.rows.row_digest import InputRows, row_digest
from nvcli.job.shard import WHOLE, Shard

FIRST_BATCH_ROWS = 8
"""The first batch is small, to give replicas work soon; batches double from here."""
MAX_BATCH_ROWS = 256
MAX_BATCH_BYTES = 4 * 1024 * 1024
_BREAKS = (OSError, CompressionError, DamagedInput)
"""Exceptions of an input that cannot be read any further."""


class RowDigests(Protocol):
    """Receives the digests of rows, in the order of their indices."""

    def wants(self, index: int) -> bool:
        """Tell whether the digest of a row is still missing."""

    def add(self, digest: bytes) -> None:
        """Take the digest of the next missing row."""


class _Batch:
    """Rows that are yielded together."""

    def __init__(self) -> None:
        self.rows: list[Job | JobResult] = []
        self._num_bytes = 0
        self._most_rows = FIRST_BATCH_ROWS

    def add(self, row: Job | JobResult, num_bytes: int) -> bool:
        """Add a row. Returns True if that fills the batch; the next one may then be larger."""
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
    """Yields the rows of all inputs that are not answered yet, once, and counts what it reads."""

    def __init__(
        self,
        inputs: Sequence[str],
        parser: RowParser,
        *,
        limit: int | None = None,
        answered: AnsweredRows | None = None,
        known: Sequence[KnownInput] = (),
        check_columns: bool = False,
        shard: Shard = WHOLE,
        digests: RowDigests | None = None,
        pdfs: Mapping[str, PdfFile] | None = None,
    ) -> None:
        """Read at most `limit` rows. Rows that are `answered` are passed over; they count as read.

        So are rows that are not of the `shard`. `known` are inputs that must be what they were when the job began. With
        `check_columns`, an input whose first rows all lack a prompt is an error, and its rows are not given out.
        `digests` takes the digests of rows, of all shards, before they are given out. `pdfs` are the inputs that are
        PDF files, by name.
        """
        self._inputs = list(inputs)
        self._parser = parser
        self.warnings = parser.warnings
        """Warnings for the user about the rows that were read."""
        self.kinds = parser.kinds
        """The kinds of prompts of the rows that were read."""
        self._limit = limit
        self._answered = answered or AnsweredRows()
        self._known = {each.name: each for each in known}
        self._digests = digests
        self._pdfs = pdfs or {}
        self._check_columns = check_columns
        self._looks_for_faults = False
        self._shard = shard
        self._source: Source | None = None
        self._line_number = 0
        """Number of the last line in its input, including blank lines."""
        self._bytes_before = 0
        self.rows_read = 0
        self.rows_of_shard = 0
        """Rows among `rows_read` that belong to the shard."""
        self.rows_passed_over = 0
        """Rows among `rows_of_shard` that were answered already."""
        self.all_read = False
        """Whether every input was read to its end, and not just to the limit."""
        self.bytes_total = _total_bytes(self._inputs)
        """Bytes of all inputs on disk; None if unknown, as for standard input."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, as they are on disk. Other threads may see a slightly different number."""
        source = self._source
        return self._bytes_before + (source.bytes_read if source is not None else 0)

    def batches(self) -> Generator[list[Job | JobResult], None, None]:
        """Yield the rows in order, in batches that end when they are full or before a read that may have to wait.

        Raises ColumnsError where the columns of an input are not those of a job, InputChanged where it is not what it
        was, and UnreadableInput after the last one if some could not be read to their ends.
        """
        batch = _Batch()
        broken: list[UnreadableInput] = []
        for name in self._inputs:
            try:
                for read in self._check_first_rows(name) if self._check_columns else self._rows(name):
                    is_due = bool(batch.rows) if read is None else batch.add(read.row, read.num_bytes)
                    if is_due:
                        yield batch.take()
            except (InputChanged, ConfigError):
                if batch.rows:
                    yield batch.take()
                raise
            except _BREAKS as error:
                broken.append(self._unreadable(name, error))
                if name != self._inputs[-1]:
                    self.warnings.add_input(str(broken[-1]))
            self._leave_source()
            if self._is_at_limit:
                break
        self.all_read = not broken and not self._is_at_limit
        if batch.rows:
            yield batch.take()
        if broken:
            raise reworded(broken[0], "\n".join(map(str, broken)))

    def identify_all(self) -> InputRows:
        """Read all rows, whatever the limit and the shard, and return their identities.

        Raises as `batches` does.
        """
        rows = InputRows()
        for name in self._inputs:
            try:
                for line in self._lines(name):
                    if line is not None:
                        row = self._parser.identify(line, index=rows.count)
                        rows.add(row_digest(line, row.own_id), name=row.name, is_repeated=row.is_repeated)
            except _BREAKS as error:
                raise self._unreadable(name, error) from error
        return rows

    def _check_first_rows(self, name: str) -> Iterator[ReadRow | None]:
        """Yield what `_rows` yields. The first rows are held back until one does not share the fault of those before,
        where one whose id cannot be used shares any.

        Raises ColumnsError where there is no such row among them. Where some rows are answered, the job's columns are
        known to be right.
        """
        held: list[ReadRow] = []
        fault: Fault | None = "bad id"
        num_others = 0
        rows = self._rows(name)
        self._looks_for_faults = True
        try:
            for read in rows:
                if read is None:
                    if not held:
                        yield None
                    continue
                held.append(read)
                if fault == "bad id":
                    fault = read.fault
                elif read.fault not in (fault, "bad id"):
                    num_others += 1
                    if num_others > held[0].begins_array:
                        fault = None
                if fault is None or len(held) == MAX_HELD_ROWS:
                    break
        except _BREAKS:
            yield from held
            raise
        self._looks_for_faults = False
        if fault not in (None, "bad id") and not self.rows_passed_over:
            held_by_fault = sorted(held, key=lambda read: read.fault == "bad id")  # the first says what is wrong
            error = refusal(_label(name), held_by_fault, self._parser)
            if error is not None:
                raise error
        yield from held
        yield from rows

    def _rows(self, name: str) -> Iterator[ReadRow | None]:
        """Yield the rows of one input, and None before a read that may have to wait."""
        for line in self._lines(name):
            if line is None:
                yield None
                continue
            row = self._row(line, name)
            self.rows_read += 1
            if row is not None:
                num_bytes = self._num_bytes(line)
                if self._looks_for_faults:
                    yield with_fault(row, line, num_bytes, self._parser)
                else:
                    yield ReadRow(row, num_bytes)
            if self._is_at_limit:
                return

    def _lines(self, name: str) -> Iterator[Row | None]:
        """Yield the lines of one input that are rows, and None before a read that may have to wait."""
        source = self._source = self._open_source(name)
        self._line_number = 0
        is_empty = True
        for line in source.lines():
            if line is None:
                yield None
                continue
            self._line_number += 1
            if not isinstance(line, bytes) or (line and not line.isspace()):
                is_empty = False
                yield line
        if is_empty:
            self.warnings.add_input(f"{_label(name)} holds no rows")
        self._leave_source()

    def _leave_source(self) -> None:
        if self._source is not None:
            self._bytes_before += self._source.bytes_read
            self._source = None

    def _open_source(self, name: str) -> Source:
        known = self._known.get(name)
        match "jsonl" if name == STREAM else input_format(name):
            case "jsonl":
                return LineSource(name, known)
            case "json":
                from nvcli.job.input.json_source import JsonSource

                return JsonSource(name, known, has_prompt=self._parser.has_prompt)
            case "csv":
                from nvcli.job.input.csv_source import CsvSource

                return CsvSource(name, known)
            case "text":
                return TextSource(name, known)
            case "pdf":
                return PdfSource(self._pdfs[name], known)
            case "parquet" | "arrow" as kind:
                from nvcli.job.input.table_source import ArrowSource, ParquetSource

                return ParquetSource(name, known) if kind == "parquet" else ArrowSource(name, known)

    def _unreadable(self, name: str, error: Exception) -> UnreadableInput:
        """Return the error of an input that could only be read in part."""
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        problem = reason.splitlines()[0].rstrip(" .:")
        way_out, past = "Replace it with an intact file", f" past {self._place}" if self._line_number else ""
        answered = ["the rows up to there"] * bool(past) + ["the other inputs"] * (len(self._inputs) > 1)
        if answered and self._digests is not None:  # by a job that goes on
            those = " and ".join(answered).capitalize()
            way_out = f"{those} are answered; replace the file with an intact one, and continue with --update"
        return UnreadableInput(f"{_label(name)}: cannot be read{past}: {problem}. {way_out}")

    @property
    def _is_at_limit(self) -> bool:
        return self._limit is not None and self.rows_read >= self._limit

    def _row(self, line: Row, name: str) -> Job | JobResult | None:
        """Parse one row; None for a row that is already answered, or belongs to another shard."""
        index = self.rows_read
        is_of_shard = index in self._shard
        is_answered = is_of_shard and index in self._answered.all
        self.rows_of_shard += is_of_shard
        if is_answered or not is_of_shard:
            is_good = is_answered and index not in self._answered.failed
            passed_over = self._parser.identify(line, index=index, is_good=is_good)
            self._note_digest(line, index, passed_over.own_id)
            self.rows_passed_over += is_answered
            return None
        where = self._place
        if len(self._inputs) > 1:
            where += f" of {_label(name)}"
        try:
            row = self._parser.parse(line, index=index, where=where)
        except BaseException as error:
            row = self._parser.failed(unexpected(error, "reading the row"), index=index, where=where)
        self._note_digest(line, index, None if row.context.is_named else row.context.id)
        return row

    def _num_bytes(self, line: Row) -> int:
        """Estimate the bytes of the last row."""
        if isinstance(line, bytes | str):
            return len(line)
        return self._source.row_bytes if self._source is not None else 0

    def _note_digest(self, line: Row, index: int, own_id: JobId | None) -> None:
        if self._digests is not None and self._digests.wants(index):
            self._digests.add(row_digest(line, own_id))

    @property
    def _place(self) -> str:
        """The place of the last row, for messages."""
        assert self._source is not None
        return self._source.place(self._line_number)


def first_rows(reader: RowReader) -> Sequence[Job | JobResult]:
    """Return the first rows that a reader gives. Raises ColumnsError if those of an input are all at fault.

    Other errors are left to the reading of the whole input.
    """
    with contextlib.closing(reader.batches()) as batches:
        try:
            return next(batches, ())
        except ColumnsError:
            raise
        except (ConfigError, InputChanged):
            return ()


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
