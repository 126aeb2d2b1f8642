"""Tells whether a job has rows with images, before any of its rows is answered: only then is a vision tower loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nvcli.job.compression import compression_of
from nvcli.job.file_formats import input_format, is_pdf
from nvcli.job.images.image_parts import images_of
from nvcli.job.job import Job, JobResult

_PART = re.compile(rb'type[\\"]{1,4}\s*:\s*[\\"]{1,4}(?:(?:input_)?image|pdf)')
"""The type of a part that is an image or a PDF file, also where a conversation is a JSON text in a key or column."""
_LONGEST_PART = 64
"""More bytes than a match of it has in practice."""
_SEARCHED_FORMATS = ("jsonl", "json", "csv")
_MAX_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 22


def have_images(inputs: Sequence[str], first_rows: Iterable[Job | JobResult]) -> bool:
    """Tell whether the first rows of inputs have images, or their files are of pages or look so.

    Files of text are searched, the first 256 MiB of all together. Of others, such as compressed files and tables, the
    first rows count alone.
    """
    if any(map(is_pdf, inputs)):
        return True
    if any(isinstance(row, Job) and row.messages is not None and images_of(row.messages) for row in first_rows):
        return True
    left = _MAX_BYTES
    for name in inputs:
        if left > 0 and not compression_of(name) and input_format(name) in _SEARCHED_FORMATS:
            is_found, num_bytes = _search(Path(name), left)
            if is_found:
                return True
            left -= num_bytes
    return False


def _search(file: Path, most: int) -> tuple[bool, int]:
    """Tell whether the first bytes of a file, at most about `most`, hold a part that is an image, and how many were
    read. A file that cannot be read holds none; whoever reads its rows says what is wrong."""
    num_bytes, rest = 0, b""
    try:
        with file.open("rb", buffering=0) as source:
            while num_bytes < most and (chunk := source.read(_CHUNK_BYTES)):
                if _PART.search(rest + chunk):
                    return True, num_bytes
                num_bytes += len(chunk)
                rest = chunk[-_LONGEST_PART:]
    except OSError:
        return False, num_bytes
    return False, num_bytes
