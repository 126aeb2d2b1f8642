"""Makes a table (Parquet, CSV or TSV) from the rows in the working file beside it.

The table is written beside its place and put there when it is whole, so there is never a part of one. A table of text
has a column for each key of any row, and the rows in the order that they have. A text stands as it is, a value that is
missing or null as an empty cell, and any other value as the JSON that it is. Cells are quoted as RFC 4180 says; lines
end with a newline alone.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from nvcli.errors import OutputError
from nvcli.job.compression import compression_of, make_packer
from nvcli.job.file_formats import plain_name
from nvcli.job.output.manifest import new_file, sync_folder
from nvcli.job.output.output_scan import valid_rows
from nvcli.job.own_files import is_csv, real_path, rewrite_path
from nvcli.job.rows.raw_values import as_text, decode_row, is_null

_CHUNK_BYTES = 1024 * 1024
"""Bytes to write at a time, each of which is a member of a compressed file."""
_EMPTY_COLUMNS = ("id", "index", "choices", "usage", "error")
"""The columns of a job without rows."""


def write_table(path: Path, rows_file: Path, rows: int) -> None:
    """Write the table at `path` from the rows in `rows_file`. Raises OutputError if their number is not `rows`."""
    table = real_path(path)
    temporary = rewrite_path(table)
    mode = (table if table.exists() else rows_file).stat().st_mode & 0o777
    try:
        with new_file(temporary, mode=0o600) as file:  # nobody else may read it before it has its own mode
            num_written = _write_rows(path, lambda: (line for _, line in valid_rows(rows_file)), file)
            if num_written != rows:
                raise OutputError(
                    f"the table {path} was not made: {rows:,} rows were answered, and {rows_file.name} "
                    f"holds {num_written:,} whole ones; the others will be computed again"
                )
            os.fchmod(file.fileno(), mode)
        temporary.replace(table)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(table.parent)


def _write_rows(path: Path, lines: Callable[[], Iterable[bytes]], file: BinaryIO) -> int:
    """Write rows in the format of the table at `path`, and return their number."""
    if is_csv(path):
        return write_csv(lines, file, name=path.name)
    from nvcli.job.output.parquet_output import write_parquet

    return write_parquet(lines, file)


def write_csv(lines: Callable[[], Iterable[bytes]], file: BinaryIO, *, name: str) -> int:
    """Write rows to an open file, and return their number.

    `lines` begins a pass over the rows and is called twice. `name` is the name that the file will have, which says what
    stands between cells and how the file is compressed. Raises OSError.
    """
    columns = list(dict.fromkeys(key for line in lines() for key in decode_row(line))) or list(_EMPTY_COLUMNS)
    pack = make_packer(compression_of(name))
    records = _Records()
    delimiter = "\t" if plain_name(name).lower().endswith(".tsv") else ","
    writer = csv.writer(records, delimiter=delimiter, lineterminator="\r\n")
    num_rows = 0
    writer.writerow(columns)
    for line in lines():
        row = decode_row(line)
        writer.writerow([_cell(row.get(column)) for column in columns])
        num_rows += 1
        if len(records.pending) >= _CHUNK_BYTES:
            file.write(pack(records.take()))
    file.write(pack(records.take()))
    return num_rows


class _Records:
    """Collects records as UTF-8, each ended by a newline.

    The writer is told to end them with both CR and LF: only then does it quote cells with either of them.
    """

    def __init__(self) -> None:
        self.pending = bytearray()

    def write(self, record: str) -> None:
        self.pending += record.removesuffix("\r\n").encode()
        self.pending += b"\n"

    def take(self) -> bytes:
        """Return the records written since the last call."""
        taken, self.pending = bytes(self.pending), bytearray()
        return taken


def _cell(value: msgspec.Raw | None) -> str:
    return "" if value is None or is_null(value) else as_text(value)
