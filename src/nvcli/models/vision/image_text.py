"""ImageText: what stands in a prompt for an image, in the words of its family's processor. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageText:
    """How the processor of a family writes an image into a prompt, beyond one token for each of the image's own."""

    written: str
    """The text that the chat template writes for an image."""
    token: str
    """The token that stands for each of the image's own."""
    before: str = ""
    """The text before the image's tokens, with the `{image}`'s number in the prompt, from 0."""
    after: str = ""
    """The text after them."""
    between: str = ""
    """The token between two rows of the image's tokens; `after` is then a token, too. Empty: rows follow each
    other."""
    tile: str = ""
    """The text before the tokens of each tile, with its `{row}` and `{column}`, or its `{number}`, from 1."""
    tile_end: str = ""
    """The text after the tokens of each tile. If this, `tile` and `column_end` are empty, the tokens of tiles follow
    each other, as if they lay below each other in one image."""
    column_end: str = ""
    """The text between two tiles of a row."""
    row_end: str = ""
    """The text between two rows of tiles."""
    whole: str = ""
    """The text before the tokens of the whole image that has tiles."""
    alone: str = ""
    """The text before the tokens of an image without tiles."""
    after_alone: str | None = None
    """The text after them; None: `after`."""

    joint: str = ""
    """A mark that stands once where two would follow each other, and has a space behind it where neither space nor `<`
    follows. Empty: there is none."""
    has_parts: bool = False
    """Whether tiles, and the whole image, are images of their own although there is no text between their tokens."""

    @property
    def parts_tiles(self) -> bool:
        """Whether an image's tiles are images of their own, mostly with text between their tokens."""
        return self.has_parts or self.tile + self.tile_end + self.column_end != ""

    def spelled(self, rows: int, grid: tuple[int, int], image: int, *, has_whole_first: bool = False) -> str:
        """Return the text of an image of `rows` rows of tokens (0: its tiles alone are read), and a grid of tiles
        before or after it, with one `token` for all of a run of its tokens: for each row where something is between
        them, for each tile and the whole image where something is, or for the image. `image`: its number in the
        prompt."""
        before = self.before.format(image=image)
        tiles = self._spelled_tiles(*grid) if self.parts_tiles else ""
        if not rows:
            return before + tiles + self.after
        after = self.after if tiles or self.after_alone is None else self.after_alone
        run = f"{self.token}{self.between}" * (rows - 1 if self.between else 0) + self.token
        whole = (self.whole if tiles else self.alone) + run + after
        if has_whole_first:
            return before + whole + tiles
        return before + tiles + whole

    def joined(self, text: str) -> str:
        """Return a prompt in which all images are spelled, with single joints."""
        if not self.joint:
            return text
        single = text.replace(2 * self.joint, self.joint)
        return re.sub(rf"{re.escape(self.joint)}(?=[^\s<])", f"{self.joint} ", single)

    def _spelled_tiles(self, rows: int, columns: int) -> str:
        """Return the text of tiles."""
        marks = (
            [self.tile.format(row=row + 1, column=n + 1, number=row * columns + n + 1) for n in range(columns)]
            for row in range(rows)
        )
        return self.row_end.join(
            self.column_end.join(mark + self.token + self.tile_end for mark in row) for row in marks
        )
