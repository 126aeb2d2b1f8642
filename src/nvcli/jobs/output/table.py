"""Makes an output that is a table (Parquet, CSV or TSV) of the rows in the working file beside it.

The table is written beside its place and put there when it is whole, so there is never a part of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nvcli.errors import OutputError
from nvcli.jobs.output.manifest import sync_folder
from nvcli.jobs.output.output_scan import valid_rows
from nvcli.jobs.own_files import is_csv, real_path, rewrite_path
from nvcli.regular_file import create_anew


def write_table(path: Path, rows_file: Path, rows: int) -> None:
    """Write the table at `path` of the rows in `rows_file`. Raises OutputError where these are not so many rows."""
    write = _writer(path)
    table = real_path(path)
    temporary = rewrite_path(table)
    mode = (table if table.exists() else rows_file).stat().st_mode & 0o777
    try:
        with create_anew(temporary, mode=0o600) as file:  # nobody else may read it before it has its own mode
            num_written = write(lambda: (line for _, line in valid_rows(rows_file)), file)
            if num_written != rows:
                raise OutputError(
                    f"the table {path} was not made: {rows:,} rows were answered, and {rows_file.name} "
                    f"holds {num_written:,} whole ones; the others will be computed again"
                )
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(table)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(table.parent)


def _writer(path: Path) -> Callable[[Callable[[], Iterable[bytes]], BinaryIO], int]:
    """Return the function that makes the table at `path` of rows, and says how many it wrote."""
    if is_csv(path):
        from nvcli.jobs.output.csv_output import write_csv

        return partial(write_csv, name=path.name)
    from nvcli.jobs.output.parquet_output import write_parquet

    return write_parquet
