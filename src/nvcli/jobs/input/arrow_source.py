"""Arrow files as rows: files and streams of Arrow's IPC format, Feather V2 and datasets on disk among them.

Needs pyarrow. A file is read and not mapped into memory: a file that is cut short while it is mapped would kill the
process. So one record batch of the file is in memory at a time, as large as its writer made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.ipc

from nvcli.jobs.input.table_source import TableSource

_FILE_START = b"ARROW1"


class ArrowSource(TableSource):
    """The rows of one Arrow file, once."""

    kind = "Arrow"

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""
        with pyarrow.OSFile(str(self._path)) as file:
            size = file.size()
            is_file = file.read(len(_FILE_START)) == _FILE_START
            file.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number), size * (number + 1) // reader.num_record_batches
            elif size:
                for batch in pyarrow.ipc.open_stream(file):
                    yield batch, file.tell()
