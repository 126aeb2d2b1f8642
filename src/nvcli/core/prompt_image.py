"""PromptImage: an image in a prompt, as the parent, the engine and the ranks know it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_PROMPT_IMAGES = 64
"""The most images of a prompt, with all their tiles."""
MOST_IMAGE_BYTES = 164
"""The most bytes of an image in a message, or of a tile that is an image of its own."""


class TileGrid(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the tokens of an image's tiles stand behind those of the whole image: in rows across all tiles, each with a
    learned vector at its end. Without tiles, one such vector stands behind the image."""

    rows: int = 0
    """Rows of tiles; 0: there are none."""
    columns: int = 0
    kept: tuple[int, int] = (0, 0)
    """The rows and columns of tokens in the middle that are not of bars around the image."""
    shown: tuple[int, int] = (0, 0)
    """The rows and columns to which these are interpolated."""
    is_marked: bool = False
    """Whether tokens follow each other tile by tile instead, with learned vectors before the whole image and behind it,
    between tiles, and behind all."""

    def num_tokens(self, tile_tokens: int) -> int:
        """Return the tokens of the image, whose tiles have `tile_tokens` in a row."""
        if self.is_marked:
            count = self.rows * self.columns
            return (1 + count) * tile_tokens**2 + 3 + max(0, count - 1)
        rows, columns = self.shown
        return tile_tokens**2 + (rows * (columns + 1) if self.rows else 1)


class PromptImage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tokens of a prompt that stand for an image, and the place of its pixels."""

    first: int
    """The position of its first token in the prompt."""
    rows: int
    columns: int
    """Tokens that lie beside each other in the image, whose tokens follow each other row by row."""
    gap: int = 0
    """Tokens of text after each row."""
    border: int = 0
    """Tokens of the image before its first row, and as many after its last."""
    behind: int = 0
    """Tokens of the image after all of these."""
    key: bytes
    """A digest of its pixels, 16 bytes."""
    file: str
    """The path of the parent's memory that holds its pixels, [height, width, 3] bytes, with a name after `#` that no
    other memory has."""
    offset: int
    """The place of its first pixel there."""
    whole_prompt: int = 0
    """The tokens of its prompt, if all of them attend to each other; 0: they do not."""
    slices: tuple[int, int] | None = None
    """The rows and columns of slices of it that follow, each an image of its own, in a model that places both on one
    canvas; None: it is a slice, or the model has none."""
    marks: int = 0
    """Tokens of marks behind it, or behind its last slice, that have a place on the canvas, too."""
    tiles: TileGrid | None = None
    """Its tiles, if its tokens stand with vectors between them, as one row; None: it is read as it is."""
    patches: tuple[int, int] | None = None
    """The rows and columns of the patches of its pixels, if its tokens are one row whatever its size; None: as many as
    its tokens have."""

    @property
    def end(self) -> int:
        """The position after its last token, and what follows its last row."""
        return self.first + self.num_tokens + self.rows * self.gap

    @property
    def whole(self) -> tuple[int, int]:
        """The first of the tokens that are computed in one step where this image must not be cut, and their end."""
        return (0, self.whole_prompt) if self.whole_prompt else (self.first, self.end)

    @property
    def num_tokens(self) -> int:
        """Its tokens, without text between them."""
        return self.rows * self.columns + 2 * self.border + self.behind

    def num_before(self, position: int) -> int:
        """Return how many of its tokens stand before a position of the prompt, from `first` to `end`."""
        if not self.gap:
            return position - self.first
        row, column = divmod(position - self.first, self.columns + self.gap)
        return row * self.columns + min(column, self.columns)


def end_of_images(images: Sequence[PromptImage]) -> int:
    """Return the position behind the last of a prompt's images, and behind what belongs to its canvas."""
    whole = next((image for image in reversed(images) if image.slices is not None), images[-1])
    return images[-1].end + whole.marks
