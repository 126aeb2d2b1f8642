"""The images of conversations: parts `{"type": "image", "image": …}`, as `job.rows.conversation` reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from msgspec.structs import replace

from nvcli.core.byte_sizes import counted
from nvcli.core.prompt_image import MAX_PROMPT_IMAGES
from nvcli.errors import RowError
from nvcli.job.images.image_fetch import invalid_image
from nvcli.job.job import Job, JobResult, failed
from nvcli.job.rows.conversation import IMAGE
from nvcli.job.rows.pdf_part import FIRST_PAGE, PAGE


def images_of_row(row: Job | JobResult) -> list[dict[str, Any]]:
    """Return the parts of a row's messages that are images, in order; of a row with an error none."""
    if not isinstance(row, Job) or row.messages is None:
        return []
    return [
        part
        for message in row.messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if part.get("type") == IMAGE
    ]


def without_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: an image is a part that says only that."""
    return [
        {**message, "content": [{"type": IMAGE} if part.get("type") == IMAGE else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


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
        raise invalid_image(part[IMAGE], f"page {first}: the file has {counted(count, 'page')}")
    if count - first >= MAX_PROMPT_IMAGES:
        raise invalid_image(
            part[IMAGE],
            f"it has {count:,} pages; allowed: {MAX_PROMPT_IMAGES} images a row, so name some in `pages`",
        )
    rest = {key: value for key, value in part.items() if key != FIRST_PAGE}
    return [{**rest, PAGE: page} for page in range(first, count + 1)]
