"""The sizes to which image processors bring images: their rules, and what of each says how many tokens an image has.

Each is held to transformers' own; `tile_size.py` has those that cut images. Torch-free: the parent, its image processes
and the ranks read them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from nvcli.core.prompt_image import TileGrid
from nvcli.kernels.whole_numbers import ceil_div, round_up

_MOST_ROUNDING = 16
MOST_RATIO = 200
"""The longest image is this many times as long as wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The size in pixels of an image as the model reads it, and how it is made. It is 0 × 0 if tiles alone are read."""

    height: int
    width: int
    tile: tuple[int, int] = (0, 0)
    """The height and width of the tiles that the model reads beside the whole image, if there are any."""
    grid: tuple[int, int] = (0, 0)
    """The rows and columns of tiles."""
    has_whole_first: bool = False
    """Whether the whole image is read before its tiles, and not after them."""
    first: tuple[int, int] | None = None
    """The height and width to which an image is brought first. The tiles are made of that, and the whole image of
    them; None: both are made of the image itself."""
    whole_first: tuple[int, int] | None = None
    """The height and width to which the whole image is brought first; None: it is not."""
    cut: tuple[int, int] | None = None
    """The height and width of what is cut into tiles, to whose size each part is then brought; None: parts have it."""
    picture: tuple[int, int] | None = None
    """The height and width of the image on what is cut into tiles, or on the image that is not cut, black around it;
    None: it fills that."""
    is_centred: bool = False
    """Whether `picture` is in the middle, and not at the top left."""
    shown: tuple[int, int] | None = None
    """The height and width to which the image is brought in the middle of the whole one; None: it fills that."""
    frame: tuple[int, int, int] = (0, 0, 0)
    """The colour around it there."""
    behind: int = 0
    """The learned vectors behind the tokens of the whole image."""
    square: tuple[int, int, int] | None = None
    """The colour of bars that make the image a square before anything else; None: it stays as it is."""
    is_squared: bool = False
    """Whether it becomes one by black to the right or below."""
    layout: TileGrid | None = None
    """`PromptImage.tiles`"""
    is_middle: bool = False
    """Whether the whole image is the middle of what it is brought to first."""
    parts: tuple[tuple[int, int], ...] = ()
    """The heights and widths to which the quarters of an image, if they are read, and then the image are brought; the
    model reads of each what fills squares of `unit` pixels. Empty: they are as other fields say."""
    unit: int = 1
    margin: int = 0
    """Pixels at the lower and right edges of each tile, and of the whole image, which fill no token and are left out:
    the tile and the image are made larger by this many."""

    @property
    def canvas(self) -> tuple[int, int]:
        """The height and width of what is cut into tiles, row by row; of an image that is not cut those of itself."""
        if self.parts:
            (tall, wide), *others = self.parts
            return (tall + others[2][0], wide + others[0][1]) if len(others) > 1 else (tall, wide)
        if self.grid == (0, 0):
            return self.height + self.margin, self.width + self.margin
        if self.cut is not None:
            return self.cut
        rows, columns = self.grid
        return rows * (self.tile[0] + self.margin), columns * (self.tile[1] + self.margin)

    @property
    def pictures(self) -> list[tuple[int, int]]:
        """The height and width of each tile, and of the whole image, if it is read, in the order in which they are."""
        if self.parts:
            return [(tall // self.unit * self.unit, wide // self.unit * self.unit) for tall, wide in self.parts]
        rows, columns = self.grid
        whole, tiles = [(self.height, self.width)] if self.height else [], [self.tile] * (rows * columns)
        return whole + tiles if self.has_whole_first else tiles + whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule(ABC):
    """How a kind of image processor chooses the sizes of images."""

    side: int
    """Pixels of the side of a token's square."""
    has_row_ends: bool = False
    """`VisionConfig.has_row_ends`"""
    border: int = 0
    """`VisionConfig.border`"""
    tokens: int = 0
    """The tokens of each picture, whatever its size; 0: as many as there are squares."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens of an image, or more."""

    @property
    def most_pictures(self) -> int:
        """The most tiles of an image, and the whole image."""
        return 1

    @property
    def most_pixels(self) -> int:
        """The most pixels of an image, or more: no side is shorter than a token's square, however long the other."""
        return self.max_tokens * self.side**2

    @abstractmethod
    def fit(self, height: int, width: int) -> Fit:
        """Return the size of an image of this height and width. Raises ValueError for one that is too long."""


def check_shape(height: int, width: int) -> None:
    """Raise ValueError for an image that is too long."""
    if max(height, width) > MOST_RATIO * min(height, width):
        raise ValueError(f"its longer side is more than {MOST_RATIO} times as long as the other")


@dataclass(frozen=True, slots=True, kw_only=True)
class AreaRule(SizeRule):
    """Sides are multiples of a token's, and the area is within limits (`smart_resize` of Qwen2-VL and GLM-4.6V)."""

    min_pixels: int
    max_pixels: int
    enlarges: Literal["", "floor", "round", "side"] = ""
    """How the sides of an image that is smaller than a token are rounded when it is enlarged, before anything else;
    side: only its shorter side is enlarged; empty: it is not enlarged."""

    @property
    def max_tokens(self) -> int:
        inner = max(1, self.max_pixels // self.side**2)
        most_rows = min(inner, math.ceil(math.sqrt(2 * MOST_RATIO * inner)))  # sides are rounded
        return inner + (most_rows if self.has_row_ends else 0) + 2 * self.border

    @property
    def most_pixels(self) -> int:
        return _MOST_ROUNDING * self.max_pixels

    def fit(self, height: int, width: int) -> Fit:
        side = self.side
        if self.enlarges == "floor" and min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        elif self.enlarges == "round":
            if height < side:
                height, width = side, round(width * side / height)
            if width < side:
                height, width = round(height * side / width), side
        check_shape(height, width)
        least = side if self.enlarges == "side" else 0
        rows, columns = (max(least, round(length / side) * side) for length in (height, width))
        if rows * columns > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(side, math.floor(length / scale / side) * side) for length in (height, width))
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(length * scale / side) * side for length in (height, width))
        return Fit(height=rows, width=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRule(SizeRule):
    """The longer side is at most so long, and both are rounded up to whole tokens (Pixtral)."""

    longest: int

    @property
    def max_tokens(self) -> int:
        """The most tokens of an image, with one after each of their rows."""
        most = ceil_div(self.longest, self.side)
        return most * (most + 1)

    def fit(self, height: int, width: int) -> Fit:
        ratio = max(height, width) / self.longest
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        rows, columns = (round_up(length, self.side) for length in (height, width))
        return Fit(height=rows, width=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledRule(SizeRule):
    """Images keep their size if they have few patches, and their shape, and are filled up with black to whole tokens
    (`navit_resize` of Kimi K2.5)."""

    merge: int
    """Patches of the side of a token's square."""
    most: int
    """The most patches of an image, each side rounded down."""
    longest: int
    """The most patches of a side."""

    @property
    def max_tokens(self) -> int:
        # rounding down leaves out a row and a column of patches, and rounding up adds some
        patches = self.most + 2 * self.longest * (1 + self.merge) + self.merge**2
        return min(patches // self.merge**2, ceil_div(self.longest, self.merge) ** 2)

    def fit(self, height: int, width: int) -> Fit:
        patch = self.side // self.merge
        most, count = self.longest * patch, max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(self.most / count), most / height, most / width)
        tall, wide = (min(max(1, int(length * scale)), most) for length in (height, width))
        return Fit(height=round_up(tall, self.side), width=round_up(wide, self.side), picture=(tall, wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule(SizeRule):
    """Images keep their size if they have no fewer and no more tokens than they may, and their shape, and are filled up
    with black to whole tokens (`smart_resize` of GLM-5.3)."""

    least: int
    most: int
    """The fewest and the most tokens of an image."""

    @property
    def max_tokens(self) -> int:
        return self.most

    def fit(self, height: int, width: int) -> Fit:
        area = self.least * self.side**2
        rows, columns = self._tokens(height, width)
        if rows * columns < self.least:
            scale = math.sqrt(area / (height * width))
            rows, columns = self._tokens(math.ceil(height * scale), math.ceil(width * scale))
        if rows * columns > self.most:

            def shown(tall: int) -> tuple[int, int]:
                return self._tokens(tall, width * tall // height)

            tallest = bisect_right(range(1, height + 1), self.most, key=lambda tall: math.prod(shown(tall)))
            rows, columns = shown(tallest) if tallest else (1, 1)
        tall, wide = rows * self.side, columns * self.side
        scale = min(tall / height, wide / width, 1.0 if height * width >= area else math.inf)
        picture = max(1, math.floor(height * scale)), max(1, math.floor(width * scale))
        return Fit(height=tall, width=wide, picture=(min(tall, picture[0]), min(wide, picture[1])))

    def _tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens that hold a picture."""
        return ceil_div(max(1, height), self.side), ceil_div(max(1, width), self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRule(SizeRule):
    """Images have their shape, and as many tokens as fit into a number of them (Gemma 4)."""

    most: int
    """The most tokens of an image."""

    @property
    def max_tokens(self) -> int:
        return self.most

    def fit(self, height: int, width: int) -> Fit:
        scale = math.sqrt(self.max_tokens * self.side**2 / (height * width))
        rows, columns = (math.floor(scale * length / self.side) for length in (height, width))
        if not rows:
            rows, columns = 1, min(math.floor(width / height), self.max_tokens)
        elif not columns:
            rows, columns = min(math.floor(height / width), self.max_tokens), 1
        return Fit(height=rows * self.side, width=columns * self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRule(SizeRule):
    """Sides are rounded up to patches, and their number is brought within limits, and then that of a token
    (`get_patch_grid_size` of Nemotron 3 Omni)."""

    merge: int
    """Patches of the side of a token's square."""
    least: int
    most: int
    """The fewest and the most patches of an image."""

    @property
    def max_tokens(self) -> int:
        return self.most // self.merge**2

    def fit(self, height: int, width: int) -> Fit:
        patch = self.side // self.merge
        rows, columns = (round(length / patch + 0.5) for length in (height, width))
        factor = min(math.sqrt(self.most / (rows * columns)), 1.0)
        rows, columns = math.floor(factor * rows), math.floor(factor * columns)
        if 0 < rows * columns < self.least < self.most:
            factor = math.sqrt(self.least / (rows * columns))
            rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
        rows = self._whole(rows, columns)
        columns = self._whole(columns, rows)
        if not 0 < rows * columns <= self.most:
            raise ValueError("its sides differ too much")
        return Fit(height=rows * patch, width=columns * patch)

    def _whole(self, count: int, other: int) -> int:
        """Round a side's patches to those of whole tokens, up if the image may have so many."""
        more = -count % self.merge
        if (count + more) * other <= self.most:
            return count + more
        return max(self.merge, count - count % self.merge) if more else count


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRule(SizeRule):
    """Images have as many tokens as they fill, or may have, rounded to the shape that is nearest to their own
    (`smart_resize` of Muse Glimmer)."""

    most: int
    """The most tokens of an image."""

    @property
    def max_tokens(self) -> int:
        return self.most

    def fit(self, height: int, width: int) -> Fit:
        tall, wide = height / self.side, width / self.side
        if tall * wide > self.most:
            ratio = wide / tall
            tall = (self.most / ratio) ** 0.5
            wide = tall * ratio
        pairs = {
            (rows, columns) for rows in _around(tall) for columns in _around(wide)
        }  # among equals its order counts
        grids = [(rows, columns) for rows, columns in pairs if rows >= 1 <= columns and rows * columns <= self.most]
        if not grids:
            grids = [(max(1, round(tall)), max(1, round(wide)))]
        rows, columns = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        if rows * columns > self.most:
            raise ValueError("its sides differ too much")
        return Fit(height=rows * self.side, width=columns * self.side)


def _around(number: float) -> tuple[int, int]:
    return math.floor(number), math.ceil(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddleRule(SizeRule):
    """Images are brought to one length of their shorter side, and only a square in the middle is read (CLIP)."""

    edge: int

    @property
    def max_tokens(self) -> int:
        return (self.edge // self.side) ** 2

    def fit(self, height: int, width: int) -> Fit:
        short, long = min(height, width), max(height, width)
        check_shape(height, width)
        long = int(self.edge * long / short)
        first = (self.edge, long) if height < width else (long, self.edge)
        return Fit(height=self.edge, width=self.edge, first=first, is_middle=True)
