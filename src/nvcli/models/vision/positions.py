"""The rotary positions of prompts with images (`get_rope_index` in transformers), without torch.

Text has one position a token. The tokens of an image share the first position as their time, and count rows and columns
from there; the text after it goes on as if the image were as long as its longer side. In models that number images, all
tokens have their place in the prompt as their time, and those of an image count rows, columns and images from 0. In
models with canvases, an image and its slices share the rows and columns of the slices, and marks stand at their
corners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    slices: tuple[int, int] | None = None
    """`PromptImage.slices`"""
    marks: int = 0
    """`PromptImage.marks`"""

    @property
    def end(self) -> int:
        return self.first + self.rows * self.columns + 2 * self.border


def offset_behind(
    positions: Callable[[Sequence[ImageSpan], int, int], Positions], images: Sequence[ImageSpan], place: int
) -> int:
    """Return what is added to the place of a token of text behind all images. `positions`: a function of this file."""
    return int(positions(images, place, place + 1)[0, 0]) - place


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


def canvas_positions(images: Sequence[ImageSpan], start: int, end: int) -> Positions:
    """Return the time, height and width of the tokens `start` to `end`, without `end`, in models with canvases: [3, end
    - start] int32. `images` are those of the whole prompt, in order.

    Each image has a mark before it and one behind it, and so have its slices, with a line break behind each of their
    rows but the last.
    """
    positions = np.empty((3, end - start), dtype=np.int32)
    positions[:] = np.arange(start, end)
    offset = 0
    for image, slices in _canvases(images):
        first, last = image.first - 1, (slices[-1] if slices else image).end + image.marks
        if first >= end:
            break
        places, longer = _places_on_canvas(image, slices, last)
        places[1:, 0] = -min(1, first + offset)  # outside of the upper left corner
        here = slice(max(first, start), max(first, start, min(last, end)))
        positions[:, here.start - start : here.stop - start] = (
            first + offset + places[:, here.start - first : here.stop - first]
        )
        offset += first + longer + 1 - last
        positions[:, max(last, start) - start :] = np.arange(max(last, start), end) + offset
    return positions


def _canvases(images: Sequence[ImageSpan]) -> Iterator[tuple[ImageSpan, Sequence[ImageSpan]]]:
    """Yield each whole image, and its slices."""
    for number, image in enumerate(images):
        if image.slices is not None:
            rows, columns = image.slices
            yield image, images[number + 1 : number + 1 + rows * columns]


def _places_on_canvas(image: ImageSpan, slices: Sequence[ImageSpan], last: int) -> tuple[Positions, int]:
    """Return where the tokens from the mark before an image to `last` are, as differences from the canvas's first
    place, [3, tokens] int32, and the longer side of the canvas."""
    start = image.first - 1
    places = np.zeros((3, last - start), dtype=np.int32)

    def put(place: int, row: int, column: int, end: int | None = None) -> None:
        places[1:, place - start : (place + 1 if end is None else end) - start] = [[row], [column]]

    height, width, columns = image.rows, image.columns, 1
    if slices:
        columns = image.slices[1] if image.slices is not None else 1
        height, width = len(slices) // columns * slices[0].rows, columns * slices[0].columns
    rows_of_image, columns_of_image = _spread(height, image.rows), _spread(width, image.columns)
    grid = np.meshgrid(rows_of_image, columns_of_image, indexing="ij")
    places[1:, image.first - start : image.end - start] = np.stack([axis.ravel() for axis in grid])
    put(image.end, height, width)
    for number, part in enumerate(slices):
        top, left = number // columns * part.rows, number % columns * part.columns
        put(part.first - 1, top, left)
        row, column = np.divmod(np.arange(part.end - part.first), part.columns)
        places[1:, part.first - start : part.end - start] = np.stack([top + row, left + column])
        put(part.end, top + part.rows - 1, left + part.columns - 1)
        if number + 1 < len(slices):
            put(part.end + 1, top + part.rows - 1, width, end=slices[number + 1].first - 1)
    return places, max(height, width)


def _spread(length: int, count: int) -> np.ndarray:
    """Spread `count` numbers evenly from 0 to `length` - 1, rounded, as torch's linspace does in float32."""
    numbers, step = np.arange(count, dtype=np.float32), np.float32(length - 1) / np.float32(max(1, count - 1))
    later = np.float32(length - 1) - step * (count - 1 - numbers)
    return np.round(np.where(numbers < count // 2, step * numbers, later if count > 1 else 0)).astype(np.int32)
