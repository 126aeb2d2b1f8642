"""CSV and TSV files as rows: the first record names the columns, and each further one is a row of texts.

Cells are quoted as RFC 4180 says, so that a record may have line ends in it. A record that cannot be read, or has more
or fewer cells than the header, is the error of its row. Holds one chunk and one record at a time.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator

from nvcli.core.byte_sizes import counted
from nvcli.core.validation import shorten
from nvcli.errors import RowError
from nvcli.job.file_formats import plain_name
from nvcli.job.input.column_check import ColumnsError, check_no_wide_text
from nvcli.job.input.known_input import KnownInput
from nvcli.job.input.line_source import LineSource
from nvcli.job.line_splitter import DroppedLine, Line
from nvcli.job.rows.bad_json import explain_bad_utf8
from nvcli.job.rows.parser import Cells, Row

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""A longer record is an error row. Without such a bound, a quote that is not closed takes the rest of the file."""
_REASONS = {
    "new-line": (
        "a carriage return stands in a cell without quotes; if lines of the file end with one alone, `tr '\\r' '\\n'` "
        "may fix that"
    ),
    "expected after": "a quote stands inside a cell in quotes; write two of them, and no backslash",
    "unexpected end": "a quote is not closed",
}
"""Reasons that messages give, by a part of the csv module's own."""

_SEPARATOR = re.compile(rb'"?sep=([,;|\t])"?\r?')
"""A line before the header with which spreadsheets tell each other the delimiter."""
_QUOTED = re.compile(rb'"[^"]*"')


class CsvSource(LineSource):
    """The rows of one CSV or TSV file, once."""

    def __init__(self, name: str, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        super().__init__(name, known)
        self._records = _RecordLines()
        self._at = "line 0"

    def place(self, number: int) -> str:
        """Return the line numbers of the last record; blank lines and the header count."""
        return self._at

    def lines(self) -> Iterator[Row | None]:
        """Yield the rows, the errors of records that are no rows, and None before each read that may have to wait.

        Raises ColumnsError for a header that does not name the columns, and else as `LineSource.lines` does.
        """
        csv.field_size_limit(sys.maxsize)  # of the process; records have a bound of their own
        columns: list[str] | None = None
        delimiter: str | None = None
        records, reader = self._records, None
        lines = self._lines()
        for line in lines:
            if line is None:
                yield None
                continue
            first = records.begin(line, lines)
            if isinstance(line, bytes) and (not line or (line.isspace() and b"\t" not in line)):
                continue
            if reader is None:
                check_no_wide_text(self.name, line)
                if delimiter is None and isinstance(line, bytes) and (named := _SEPARATOR.fullmatch(line)):
                    delimiter = named[1].decode()
                    continue
                reader = csv.reader(records, delimiter=delimiter or _delimiter(self.name, line), strict=True)
            row: Row | list[str]
            try:
                row = next(reader)
            except RowError as error:
                row = error
            except csv.Error as error:
                why = next((why for part, why in _REASONS.items() if part in str(error)), error)
                row = RowError("invalid_csv", f"not valid CSV: {why}")
            self._at = f"line {first}" if first == records.number else f"lines {first} to {records.number}"
            if columns is None:
                columns = _check_header(row, self.name, self._at)
            elif isinstance(row, list):
                self.row_bytes = records.num_bytes
                yield _row_of(columns, row)
            else:
                yield row


class _RecordLines:
    """Feeds `csv.reader` the lines of one record at a time. An error ends the record, not the file."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the last line."""
        self.num_bytes = 0
        """Bytes of the current record."""
        self._first: Line | None = None
        self._lines: Iterator[Line | None] = iter(())

    def begin(self, line: Line, lines: Iterator[Line | None]) -> int:
        """Begin a record with its first line. The further ones come from `lines`. Returns the first line's number."""
        self._first, self._lines, self.num_bytes = line, lines, 0
        self.number += 1
        return self.number

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line, self._first = self._first, None
        if line is None:
            line = next(line for line in self._lines if line is not None)
            self.number += 1
        if not isinstance(line, DroppedLine):
            self.num_bytes += len(line) + 1
        if isinstance(line, DroppedLine) or self.num_bytes > MAX_RECORD_BYTES:
            raise RowError(
                "line_too_long",
                f"the record has more than {MAX_RECORD_BYTES >> 20} MiB, the most that a row of CSV may have; "
                "a quote may not be closed",
            )
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError as error:
            raise RowError(
                "invalid_utf8",
                f"{explain_bad_utf8(line, error.reason)}; for a file of a spreadsheet, "
                "`iconv -f WINDOWS-1252 -t UTF-8` may fix that",
            ) from None


def _delimiter(name: str, header: Line) -> str:
    """Return the delimiter: a tab for `.tsv`, otherwise a comma, or what a header without commas has in its place."""
    text = _QUOTED.sub(b"", header) if isinstance(header, bytes) else b""
    if plain_name(name).lower().endswith(".tsv"):
        return "\t"
    if b"," not in text:
        return next((mark for mark in ";\t|" if mark.encode() in text), ",")
    return ","


def _check_header(row: Row | list[str], name: str, place: str) -> list[str]:
    """Return the names of the columns. Raises ColumnsError."""
    if not isinstance(row, list):
        why = row.message if isinstance(row, RowError) else ""
        raise ColumnsError(f"{name}: {place}, which names the columns, cannot be read: {why}")
    if row.count("") > 1:  # as spreadsheets write columns that were once used
        row = [column or f"column {number}" for number, column in enumerate(row, 1)]
    if len(set(row)) < len(row):
        twice = next(column for column in row if row.count(column) > 1)
        raise ColumnsError(
            f"{name}: {place}, which names the columns, names `{shorten(twice)}` twice; rename one, or add a line with "
            "the names of the columns if there is none"
        )
    return row


def _row_of(columns: list[str], cells: list[str]) -> Cells | RowError:
    """Return the row of a record, or its error if the number of cells is not that of the columns."""
    if len(cells) != len(columns):
        names = ", ".join(f"`{shorten(column)}`" for column in columns[:12])
        return RowError(
            "ragged_row",
            f"it has {counted(len(cells), 'cell')}, and there are {len(columns)} columns: "
            f"{names}{', …' if len(columns) > 12 else ''}; a cell with a delimiter in it must be quoted",
        )
    return Cells((column, cell) for column, cell in zip(columns, cells, strict=True) if cell)
