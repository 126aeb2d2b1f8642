"""How large a job can be at most, where that is quickly seen: small jobs need fewer slots and fewer CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.jobs.files import STREAM
from nvcli.jobs.input.reader import RowReader
from nvcli.jobs.job import Job

_QUICKLY_READ_BYTES = 1 << 20


def most_requests(inputs: Sequence[str], make_reader: Callable[[], RowReader], *, enough: int) -> int:
    """Requests (samples of rows) that the inputs can make; `enough` where they make more, or take long to read.

    `make_reader`: a new reader of the inputs.
    """
    paths = [Path(name) for name in inputs if name != STREAM]
    if len(paths) < len(inputs) or any(not path.is_file() for path in paths):
        return enough
    if sum(path.stat().st_size for path in paths) > _QUICKLY_READ_BYTES:
        return enough
    count = 0
    try:
        for rows in make_reader().batches():
            count += sum(row.sampling.n for row in rows if isinstance(row, Job))
            if count >= enough:
                return enough
    except ConfigError:
        return enough  # a damaged file: its rows are answered as far as they go, and the job says so then
    return max(1, count)
