"""The images of conversations: parts `{"type": "image", "image": …}`, as `job.rows.conversation` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvcli.job.job import Job, JobResult
from nvcli.job.rows.conversation import IMAGE


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
