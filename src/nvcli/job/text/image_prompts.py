"""The images of a batch of rows, and the prompts that hold their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.core.messages import pack
from nvcli.errors import RowError
from nvcli.job.images.image_parts import images_of_row
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.images.row_images import PromptImages, RowImages
from nvcli.job.job import Job, JobResult
from nvcli.job.text.chat_renderer import Conversation

_PIXELS_PER_BYTE = 8
"""Bytes of pixels that count as one where rows that wait or run are limited: an engine must get as many rows as it can
run, and 512 images of 1,024 x 768 take 1.2 GB."""


def read_images(
    images: RowImages | None,
    why_none: str,
    rows: Sequence[Job | JobResult],
    prompts: dict[int, list[int] | RowError],
    conversations: dict[int, Conversation],
) -> dict[int, list[Pixels]]:
    """Return the pixels of the rows that have images. Rows whose images cannot be read get an error in `prompts`,
    and are taken out of `conversations`; with `images` None that is all of them, and `why_none` says why."""
    having = {at: parts for at in conversations if (parts := images_of_row(rows[at]))}
    if not having:
        return {}
    found: Sequence[list[Pixels] | RowError]
    if images is None:
        found = [RowError("unsupported_content", f"the row has images, and {why_none}")] * len(having)
    else:
        found = images.read(list(having.values()))
    pixels: dict[int, list[Pixels]] = {}
    for at, each in zip(having, found, strict=True):
        if isinstance(each, RowError):
            prompts[at] = each
            del conversations[at]
        else:
            pixels[at] = each
    return pixels


def packed(ids: Sequence[int], images: PromptImages | None, num_tokens: int) -> bytes:
    """Return a prompt as `Request.prompt_ids` has it. Raises RowError if it has images, and is not all of its
    `num_tokens` tokens."""
    if images is None:
        return pack(ids)
    if len(ids) < num_tokens:
        raise RowError("prompt_too_long", f"the prompt has {num_tokens:,} tokens with its images, and is not cut")
    return images.packed(ids)


def counted_bytes(images: PromptImages | None) -> int:
    """Return the bytes that images count as while their row waits or runs."""
    return 0 if images is None else images.num_bytes // _PIXELS_PER_BYTE
