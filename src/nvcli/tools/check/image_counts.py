"""Images of a job's rows: how many there are, of which sizes, and how many tokens they have."""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.job.images.row_images import PromptImages
from nvcli.tools.check.lengths import PromptLengths, lengths_of

_SIZES = 8
"""The most sizes that are named."""


class ImageSize(msgspec.Struct, frozen=True, kw_only=True):
    """A size in pixels, as the model reads images, and the number of images and tiles that have it."""

    width: int
    height: int
    images: int


class ImageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The images of rows that can be answered."""

    rows: int
    """Rows with images."""
    tokens: PromptLengths
    """Tokens of single images."""
    sizes: list[ImageSize]
    """The most frequent sizes, the first ones first."""
    other_sizes: int
    """Further sizes."""


class ImageCounts:
    """Counts of the images so far."""

    def __init__(self) -> None:
        self._rows = 0
        self._tokens: Counter[int] = Counter()
        self._sizes: Counter[tuple[int, int]] = Counter()

    def add(self, images: PromptImages) -> None:
        """Add the images of a row."""
        self._rows += 1
        self._tokens.update(images.num_tokens)
        self._sizes.update((width, height) for pixels in images.pixels for height, width in pixels.fit.pictures)

    def report(self) -> ImageReport | None:
        """Summarise the images; None if there are none."""
        tokens = lengths_of(self._tokens)
        if tokens is None:
            return None
        frequent = self._sizes.most_common(_SIZES)
        sizes = [ImageSize(width=width, height=height, images=count) for (width, height), count in frequent]
        return ImageReport(rows=self._rows, tokens=tokens, sizes=sizes, other_sizes=len(self._sizes) - len(sizes))
