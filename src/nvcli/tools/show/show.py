"""`nvcli show` selects rows of an output."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nvcli.core.system.regular_file import check_regular
from nvcli.errors import ConfigError
from nvcli.job.own_files import is_table, rows_path
from nvcli.tools.show.answers import ShownRow, read_shown_row
from nvcli.tools.show.output_file import OutputFile, find_id, find_index, open_output_file, sample_lines

_FIRST_LINES = 100
"""An output has a row among this many lines at its beginning; the others may be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows to show. `id` and `index` exclude the other criteria."""

    errors: bool = False
    """Whether to show rows with errors; with `cut`, rows of either kind."""
    cut: bool = False
    """Whether to show rows with an answer cut at its length limit."""
    random: int | None = None
    """The number of rows to draw at random; None for all."""
    limit: int | None = None
    id: str | None = None
    """The id of the only row to show, as typed."""
    index: int | None = None
    """The input number of the only row to show, from 0."""


def choose_file(name: str) -> Path:
    """Return the file with an output's rows: for an unfinished table, the file of rows next to it.

    Raises ConfigError.
    """
    path = Path(name)
    working = rows_path(path)
    if is_table(path) and not path.exists() and working.exists():
        path = working
    try:
        check_regular(path)
    except OSError as error:
        raise ConfigError(f"the output {name} cannot be read: {error.strerror}") from None
    return path


def shown_rows(path: Path, selection: Selection, rng: random.Random) -> Iterator[tuple[ShownRow, bytes]]:
    """Yield the selected rows, each with its JSON.

    Raises ConfigError if the file is not an output, has no rows, or has no row with the id or number.
    """
    file = open_output_file(path)
    try:
        _check_output(path, file)
        lines = iter(_chosen(path, file, selection, rng))
        for line in islice(lines, selection.limit):
            row = read_shown_row(line)
            assert row is not None
            yield row, line
    except OSError as error:
        raise ConfigError(f"the output {path} cannot be read: {error.strerror}") from None


def _chosen(path: Path, file: OutputFile, selection: Selection, rng: random.Random) -> Iterator[bytes] | list[bytes]:
    if selection.id is not None:
        return [_found(find_id(file, selection.id), path, f"the id {selection.id}")]
    if selection.index is not None:
        return [_found(find_index(file, selection.index), path, f"the index {selection.index}")]
    wanted = _wanted(file, selection)
    if selection.random is None:
        return wanted
    if selection.errors or selection.cut:
        return sample_lines(wanted, selection.random, rng)
    return file.sample(selection.random, rng)


def _found(line: bytes | None, path: Path, what: str) -> bytes:
    if line is None:
        raise ConfigError(f"{path} has no row with {what}")
    return line


def _wanted(file: OutputFile, selection: Selection) -> Iterator[bytes]:
    """Yield rows of the selected kinds."""
    takes_all = not selection.errors and not selection.cut
    for line in file.lines():
        if not takes_all and not _may_be_wanted(line, selection):
            continue
        row = read_shown_row(line)
        if row is None:
            continue
        if takes_all or (selection.errors and row.error is not None) or (selection.cut and row.is_cut):
            yield line


def _may_be_wanted(line: bytes, selection: Selection) -> bool:
    """Whether a row may have an error or a cut answer, judged without decoding it: most rows have neither."""
    if selection.cut and b'"length"' in line:
        return True
    is_answered = b'"error":null' in line and line.count(b'"error"') == 1
    return selection.errors and not is_answered


def _check_output(path: Path, file: OutputFile) -> None:
    """Raise ConfigError if the file does not begin with output rows."""
    first = None
    for line in islice(file.lines(), _FIRST_LINES):
        if read_shown_row(line) is not None:
            return
        first = first or line.strip()
    if not first:
        raise ConfigError(f"{path} has no rows")
    beside = path.with_name(f"{path.name.partition('.')[0]}.out.jsonl")
    hint = f"; its answers may be in {beside}" if beside != path and beside.exists() else ""
    raise ConfigError(
        f"{path} is not an output of nvcli: it begins with {first[:60].decode(errors='replace')!r}, but output rows "
        f"have `index` and `choices`, or `custom_id` and `response`{hint}"
    )
