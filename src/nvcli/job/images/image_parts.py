"""The images of conversations: parts `{"type": "image", "image": …}`, as `job.rows.conversation` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvcli.job.job import Job, JobResult
from nvcli.job.rows.conversation import IMAGE


def images_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of messages that are images, in order."""
    return [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if part.get("type") == IMAGE
    ]


def images_of_row(row: Job | JobResult) -> list[dict[str, Any]]:
    """Return the parts of a row that are images; of a row with an error none."""
    return images_of(row.messages) if isinstance(row, Job) and row.messages is not None else []


def without_images(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: an image is a part that says only that."""
    return [
        {**message, "content": [{"type": IMAGE} if part.get("type") == IMAGE else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
