"""Helpers to read rows from bytes and to see what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.parser import RowParser

ReadRows = Callable[..., list[Job | JobResult]]


@pytest.fixture
def read_rows(tmp_path: Path) -> ReadRows:
    """read_rows(b"…", b"…") → the rows of files with these contents."""

    def read(
        *contents: bytes, defaults: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> list[Job | JobResult]:
        names = []
        for number, content in enumerate(contents):
            path = tmp_path / f"in{number}.jsonl"
            path.write_bytes(content)
            names.append(str(path))
        reader = RowReader(names, RowParser(defaults or {}), limit=limit)
        return [row for batch in reader.batches() for row in batch]

    return read
