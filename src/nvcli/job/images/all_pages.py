"""Puts a part for each page in place of a part that stands for all pages of a PDF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from msgspec.structs import replace

from nvcli.core.prompt_image import MAX_PROMPT_IMAGES
from nvcli.errors import RowError
from nvcli.job.images.image_fetch import refused
from nvcli.job.images.image_parts import images_of_row
from nvcli.job.job import Job, JobResult, failed
from nvcli.job.rows.conversation import IMAGE
from nvcli.job.rows.pdf_part import FIRST_PAGE, PAGE


def with_all_pages(
    rows: Sequence[Job | JobResult], count: Callable[[str], int | RowError], threads: Executor
) -> list[Job | JobResult]:
    """Return rows with a part for each page of their PDF files, whose pages `count` counts, several files at a time.
    A file whose pages cannot be counted is its row's error."""
    files = dict.fromkeys(part[IMAGE] for row in rows for part in images_of_row(row) if FIRST_PAGE in part)
    if not files:
        return [*rows]
    counts = dict(zip(files, threads.map(count, files), strict=True))
    return [_expanded(row, counts) for row in rows]


def _expanded(row: Job | JobResult, counts: dict[str, int | RowError]) -> Job | JobResult:
    if isinstance(row, JobResult) or not any(FIRST_PAGE in part for part in images_of_row(row)):
        return row
    try:
        return replace(row, messages=[_with_pages(message, counts) for message in row.messages or ()])
    except RowError as error:
        return failed(row.context, error)


def _with_pages(message: dict[str, Any], counts: dict[str, int | RowError]) -> dict[str, Any]:
    if not isinstance(content := message.get("content"), list):
        return message
    parts: list[dict[str, Any]] = []
    for part in content:
        parts += _pages(part, counts[part[IMAGE]]) if FIRST_PAGE in part else [part]
    return {**message, "content": parts}


def _pages(part: dict[str, Any], count: int | RowError) -> list[dict[str, Any]]:
    if isinstance(count, RowError):
        raise count
    first = part[FIRST_PAGE]
    if first > count:
        raise refused(part[IMAGE], f"page {first}: the file has {count:,} pages")
    if count - first >= MAX_PROMPT_IMAGES:
        raise refused(
            part[IMAGE],
            f"it has {count:,} pages; allowed: {MAX_PROMPT_IMAGES} images a row, so name some in `pages`",
        )
    rest = {key: value for key, value in part.items() if key != FIRST_PAGE}
    return [{**rest, PAGE: page} for page in range(first, count + 1)]
