"""The rotary positions of prompts with images (`get_rope_index` in transformers), without torch.

Text has one position a token. The tokens of an image share the first position as their time, and count rows and columns
from there; the text after it goes on as if the image were as long as its longer side. In models that number images, all
tokens have their place in the prompt as their time, and those of an image count rows, columns and images from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Positions = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class ImageSpan(NamedTuple):
    """The tokens of an image in a prompt."""

    first: int
    """The position of its first token in the prompt."""
    rows: int
    columns: int
    """Tokens that lie beside each other in the image."""
    border: int = 0
    """Tokens before its first row, and after its last, that are turned as text."""

    @property
    def end(self) -> int:
        return self.first + self.rows * self.columns + 2 * self.border


def offset_behind(images: Sequence[ImageSpan], position: int) -> int:
    """Return what is added to the place of a token of text, after the images that end at `position` or before."""
    return sum(max(image.rows, image.columns) - image.rows * image.columns for image in images if image.end <= position)


def angle_positions(images: Sequence[ImageSpan], start: int, end: int) -> Positions:
    """Return the time, height and width of the tokens `start` to `end`, without `end`: [3, end - start] int32.

    `images` are those of the whole prompt, in order.
    """
    positions = np.empty((3, end - start), dtype=np.int32)
    positions[:] = np.arange(start, end)
    offset = 0
    for image in images:
        first, end_here = max(image.first, start), max(image.end, start)
        if image.first >= end:
            break
        base = image.first + offset
        if first < min(image.end, end):
            index = np.arange(first, min(image.end, end)) - image.first
            rows, columns = np.divmod(index, image.columns)
            positions[:, first - start : first - start + len(index)] = base + np.stack([0 * rows, rows, columns])
        change = max(image.rows, image.columns) - (image.end - image.first)
        offset += change
        positions[:, end_here - start :] += change
    return positions


def numbered_positions(images: Sequence[ImageSpan], start: int, end: int) -> Positions:
    """Return the place, row, column and number of the image of the tokens `start` to `end`, without `end`, in models
    that number images; of text four times the place: [4, end - start] int32. `images` are those of the whole prompt, in
    order."""
    positions = np.empty((4, end - start), dtype=np.int32)
    positions[:] = np.arange(start, end)
    for number, image in enumerate(images):
        first, last = image.first + image.border, image.end - image.border
        here = np.arange(max(first, start), min(last, end))
        rows, columns = np.divmod(here - first, image.columns)
        positions[1:, here - start] = np.stack([rows, columns, 0 * rows + number])
    return positions
