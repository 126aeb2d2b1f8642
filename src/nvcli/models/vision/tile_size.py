"""The rules of sizes that cut images into tiles, which the model reads beside the whole image or alone.

Each is held to transformers' own. Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from nvcli.core.prompt_image import TileGrid
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.vision.image_size import MOST_RATIO, AreaRule, Fit, SizeRule, check_shape

_ENOUGH = 0.9
"""Ovis 2: the part of an image's pixels that its tiles are to show."""
_MOST_SHRINKING = 1.1
"""Rows and columns of tokens are shown that are too many by a smaller factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRule(SizeRule):
    """Images are cut into equal squares, or all are brought to one."""

    tile: int
    """Pixels of the side of a tile, of which the last may fill no token."""

    @property
    def max_tokens(self) -> int:
        return self.most_pictures * (self.tile // self.side) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WideRule:
    """Wide images that are made much smaller may have more tiles (`get_tile_budget` of Granite Docling)."""

    most: int
    """The most tiles of such an image."""
    scale: float
    """The part of its width below which the usual tiles show it; 0: any."""
    least_ratio: float
    """The width, in heights, that it exceeds; 0: any."""
    most_ratio: float
    """The largest width, in heights, that it may have; 0: any."""

    def takes(self, height: int, width: int, shown: int) -> bool:
        """Tell whether an image of this size, which the usual tiles show `shown` pixels wide, may have more."""
        ratio = width / height
        if not self.scale and not self.least_ratio:
            return False
        if (self.least_ratio and ratio <= self.least_ratio) or (self.most_ratio and ratio > self.most_ratio):
            return False
        return not self.scale or shown / width < self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRule(CutRule):
    """Images are cut into equal squares, in the arrangement that fits them best (`get_optimal_tiled_canvas` of InternVL
    and of Command A Vision, `get_min_tile_covering_grid` of Ovis 2); or all are brought to one square."""

    margin: int = 0
    """`Fit.margin`"""
    least: int = 1
    most: int = 1
    """The fewest and the most tiles, the whole image not counted, which follows if there are several."""
    longest: int = 64
    """The most tiles of a side."""
    wide: WideRule | None = None
    """The images that may have more tiles; None: none may."""
    fits: Literal["shape", "scale", "area"] = "shape"
    """shape: the arrangement's shape is nearest to the image's; scale: the image is enlarged least, or if it cannot be,
    made smaller least; area: it is the smallest that shows most of the image's pixels, its columns taken for rows."""
    is_marked: bool = False
    """`TileGrid.is_marked`"""

    @property
    def most_pictures(self) -> int:
        most = max(self.most, 0 if self.wide is None else self.wide.most)
        return most + (most > 1)

    @property
    def max_tokens(self) -> int:
        return super(TileRule, self).max_tokens + (self.most + 2) * self.is_marked

    def fit(self, height: int, width: int) -> Fit:
        tile, (rows, columns) = self.tile, self._arrangement(height, width)
        fit = Fit(height=tile, width=tile, margin=self.margin)
        if rows * columns > 1:
            fit = replace(fit, tile=(tile, tile), grid=(rows, columns))
        if self.is_marked:
            fit = replace(fit, layout=TileGrid(rows=fit.grid[0], columns=fit.grid[1], is_marked=True))
        return fit

    def _arrangement(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles. Among arrangements of one shape, the larger one is taken while the
        image fills more than half of it."""
        if self.wide is not None:
            usual = replace(self, wide=None)._arrangement(height, width)
            if not self.wide.takes(height, width, usual[1] * self.tile):
                return usual
            return replace(self, wide=None, most=self.wide.most)._arrangement(height, width)
        sides = range(1, min(self.most, self.longest) + 1)
        found = [(w, h) for w in sides for h in sides if self.least <= w * h <= self.most]
        found.sort(key=lambda each: each[0] * each[1])
        if self.fits == "scale":
            scales = [min(self.tile * columns / width, self.tile * rows / height) for columns, rows in found]
            larger = [scale for scale in scales if scale >= 1]
            columns, rows = found[scales.index(min(larger) if larger else max(scales))]
            return rows, columns
        if self.fits == "area":
            shown = {grid: self._shown(height, width, *grid) for grid in found}
            if enough := [grid for grid in found if shown[grid] > _ENOUGH]:
                found = [grid for grid in enough if math.prod(grid) == math.prod(enough[0])]
            columns, rows = max(found, key=shown.__getitem__)  # transformers tries them as rows and columns
            return rows, columns
        best, nearest = (1, 1), math.inf
        for columns, rows in found:
            apart = abs(width / height - columns / rows)
            if apart < nearest or (apart == nearest and width * height > 0.5 * self.tile**2 * columns * rows):
                best, nearest = (columns, rows), apart
        return best[1], best[0]

    def _shown(self, height: int, width: int, rows: int, columns: int) -> float:
        """Return the part of an image's pixels that squares of a tile's size show of a grid of its parts, of which the
        last of a row or column have what remains."""
        tall, wide = ([size // count] * (count - 1) for size, count in ((height, rows), (width, columns)))
        parts = [
            (max(down, across), min(down, across))
            for down in (*tall, height - sum(tall))
            for across in (*wide, width - sum(wide))
        ]
        tile = self.tile
        return sum(short / long * tile * tile if long > tile else long * short for long, short in parts) / (
            height * width
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedRule(SizeRule):
    """Images are brought to one length of their longer side, in a frame that makes them square, and those that are
    larger than a tile are also cut into tiles (DeepSeek-OCR 2)."""

    edge: int
    """Pixels of the side of the whole image."""
    tiles: TileRule
    frame: tuple[int, int, int]
    """The frame's colour."""
    behind: int
    """`Fit.behind`"""

    @property
    def most_pictures(self) -> int:
        return self.tiles.most + 1

    @property
    def max_tokens(self) -> int:
        of_tile = (self.tiles.tile // self.side) ** 2
        return self.tiles.most * of_tile + (self.edge // self.side) ** 2 + self.behind

    @property
    def most_pixels(self) -> int:
        return self.tiles.most * self.tiles.tile**2 + self.edge**2

    def fit(self, height: int, width: int) -> Fit:
        check_shape(height, width)
        scale = self.edge / max(height, width)
        shown = max(1, round(height * scale)), max(1, round(width * scale))
        fit = Fit(height=self.edge, width=self.edge, shown=shown, frame=self.frame, behind=self.behind)
        if max(height, width) <= self.tiles.tile:
            return fit
        tiles = self.tiles.fit(height, width)
        return replace(fit, tile=tiles.tile, grid=tiles.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule(CutRule):
    """Images are brought to one length, and cut into equal squares as they are then (Idefics 3)."""

    longest: int
    """The length to which the longer side is brought, however short it was."""
    is_cut: bool = True
    """Whether images are cut, or brought to one square."""

    @property
    def most_pictures(self) -> int:
        most = ceil_div(self.longest, self.tile) if self.is_cut else 1
        return most**2 + (most > 1)

    def fit(self, height: int, width: int) -> Fit:
        ratio, longest = width / height, self.longest
        if width >= height:
            first = max(1, _even(int(longest / ratio))), longest
        else:
            first = longest, max(1, _even(int(longest * ratio)))
        rows, columns = self._arrangement(*first) if self.is_cut else (1, 1)
        kept = self.tile // self.side * self.side
        fit = Fit(height=kept, width=kept, first=first, margin=self.tile - kept)
        return fit if rows * columns == 1 else replace(fit, tile=(kept, kept), grid=(rows, columns))

    def _arrangement(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles: one side is rounded up to whole tiles, and the other after it."""
        tile, ratio = self.tile, width / height
        if width >= height:
            columns = ceil_div(width, tile)
            return ceil_div(int(columns * tile / ratio), tile), columns
        rows = ceil_div(height, tile)
        return rows, ceil_div(int(rows * tile * ratio), tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarterRule(SizeRule):
    """Images, and quarters of them, keep their size within limits, which come before their shape
    (`get_resize_output_image_size` of Idefics 2)."""

    shortest: int
    longest: int
    """The fewest and the most pixels of a side."""
    is_cut: bool
    """Whether quarters are read beside the whole image."""

    @property
    def most_pictures(self) -> int:
        return 5 if self.is_cut else 1

    @property
    def max_tokens(self) -> int:
        return self.most_pictures * self.tokens

    @property
    def most_pixels(self) -> int:
        return self.most_pictures * self.longest**2

    def fit(self, height: int, width: int) -> Fit:
        if self.is_cut and min(height, width) < 2:
            raise ValueError("it has fewer than 2 pixels in a row or column, and is read in quarters, too")
        tall, wide = ((length // 2, length - length // 2) for length in (height, width))
        quarters = [(down, across) for down in tall for across in wide] if self.is_cut else []
        parts = tuple(self._limited(*size) for size in (*quarters, (height, width)))
        fit = Fit(height=0, width=0, parts=parts, unit=self.side, grid=(2, 2) if self.is_cut else (0, 0))
        height, width = fit.pictures[-1]
        return replace(fit, height=height, width=width)

    def _limited(self, height: int, width: int) -> tuple[int, int]:
        ratio = width / height
        if width >= height and width > self.longest:
            height, width = int(self.longest / ratio), self.longest
        elif height > width and height > self.longest:
            height, width = self.longest, int(self.longest * ratio)
        return max(height, self.shortest), max(width, self.shortest)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRule(SizeRule):
    """Images keep their shape on the grid of tiles on which most of them is seen (`select_best_resolution` of
    LLaVA-NeXT)."""

    tile: int
    """Pixels of the side of a tile, as far as they fill tokens."""
    margin: int
    """`Fit.margin`"""
    grids: tuple[tuple[int, int], ...]
    """The rows and columns of tiles of each grid."""
    most_tiles: int = 0
    """The tiles whose tokens are all shown; those of more are interpolated to about as many. 0: all are shown."""
    square: tuple[int, int, int] | None = None
    """The colour of bars that make each of several images of a prompt a square, which has no tiles; None: they are as
    a single one."""
    is_alone: bool = True
    """Whether the image is the prompt's only one."""

    @property
    def max_tokens(self) -> int:
        tokens = (self.tile // self.side) ** 2
        shown = max(rows * columns for rows, columns in self.grids)
        if self.most_tiles:
            shown = min(shown, math.ceil(_MOST_SHRINKING**2 * self.most_tiles))
        return (1 + shown) * tokens + max(rows for rows, _ in self.grids) * self.tile // self.side

    @property
    def most_pixels(self) -> int:
        return (1 + max(rows * columns for rows, columns in self.grids)) * self.tile**2

    def fit(self, height: int, width: int) -> Fit:
        tile, margin = self.tile, self.margin
        if not self.is_alone and self.square is not None:
            return Fit(height=tile, width=tile, margin=margin, square=self.square, layout=TileGrid())
        rows, columns = self._grid(height, width)
        tall, wide = rows * (tile + margin), columns * (tile + margin)
        across, down = wide / width, tall / height
        bars = min(math.ceil(height * across), tall), wide
        if across >= down:
            bars = tall, min(math.ceil(width * down), wide)
        kept = self._kept(height, width, rows, columns)
        shown, most = kept, self.most_tiles * (tile // self.side) ** 2
        if most and (shrinking := math.sqrt(kept[0] * kept[1] / most)) > _MOST_SHRINKING:
            shown = int(kept[0] // shrinking), int(kept[1] // shrinking)
        layout = TileGrid(rows=rows, columns=columns, kept=kept, shown=shown)
        fit = Fit(height=tile, width=tile, tile=(tile, tile), grid=(rows, columns), margin=margin)
        return replace(fit, picture=bars, is_centred=True, layout=layout)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles."""
        best, most, least_wasted, tile = self.grids[0], 0, math.inf, self.tile + self.margin
        for rows, columns in self.grids:
            scale = min(columns * tile / width, rows * tile / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            wasted = rows * columns * tile**2 - seen
            if seen > most or (seen == most and wasted < least_wasted):
                best, most, least_wasted = (rows, columns), seen, wasted
        return best

    def _kept(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of tokens in the middle that are not of bars alone (`unpad_image`)."""
        count = self.tile // self.side
        tall, wide = rows * count, columns * count
        if width / height > wide / tall:
            return tall - (tall - int(round(height * (wide / width), 7))) // 2 * 2, wide
        return tall, wide - (wide - int(round(width * (tall / height), 7))) // 2 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasRule(CutRule):
    """Images keep their shape on the arrangement of tiles that enlarges them least, or if none can hold them, makes
    them smaller least; they are enlarged to one tile at most, and filled up with black (`get_best_fit` of Llama 4)."""

    most: int
    """The most tiles, the whole image not counted."""

    @property
    def most_pictures(self) -> int:
        return self.most + (self.most > 1)

    def fit(self, height: int, width: int) -> Fit:
        tile, (rows, columns) = self.tile, self._arrangement(height, width)
        tall, wide = min(max(height, tile), rows * tile), min(max(width, tile), columns * tile)
        across, down = wide / width, tall / height
        picture = min(math.floor(height * across), tall), wide
        if across >= down:
            picture = tall, min(math.floor(width * down), wide)
        fit = Fit(height=tile, width=tile, picture=(max(1, picture[0]), max(1, picture[1])))
        return fit if rows * columns == 1 else replace(fit, tile=(tile, tile), grid=(rows, columns))

    def _arrangement(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles; among equals, the fewest. Scales are compared in float32."""
        grids = [(rows, n // rows) for n in range(1, self.most + 1) for rows in range(1, n + 1) if n % rows == 0]
        import numpy as np  # late: commands that meet no image start without it

        sides = np.array(grids) * self.tile
        image = np.array([height, width], dtype=np.float32)
        scales: list[float] = (sides.astype(np.float32) / image).min(axis=1).tolist()
        larger = [scale for scale in scales if scale >= 1]
        return grids[scales.index(min(larger) if larger else max(scales))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeRule(SizeRule):
    """Large images are cut into tiles, and all become as large as an area allows (LFM2-VL)."""

    whole: AreaRule
    tiles: TileRule
    patch: int
    """Pixels of the side of a patch, and the least of a side where areas are compared."""
    most_uncut: float
    """The area in pixels, in whole tokens, of the largest image that is not cut."""
    has_whole: bool = True
    """Whether the whole image follows its tiles."""

    @property
    def max_tokens(self) -> int:
        return self.tiles.most * (self.tiles.tile // self.side) ** 2 + self.whole.max_tokens

    @property
    def most_pixels(self) -> int:
        return self.tiles.most * self.tiles.tile**2 + self.whole.most_pixels

    @property
    def most_pictures(self) -> int:
        return self.tiles.most + 1

    def fit(self, height: int, width: int) -> Fit:
        fit = self.whole.fit(height, width)
        rows, columns = (max(self.patch, round(length / self.side) * self.side) for length in (height, width))
        if rows * columns <= self.most_uncut:
            return fit
        tiles = self.tiles.fit(height, width)
        whole = fit if self.has_whole else Fit(height=0, width=0)
        return replace(whole, tile=tiles.tile, grid=tiles.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRule(SizeRule):
    """Images get about one area, and so do the slices into which larger ones are cut (MiniCPM-V)."""

    edge: int
    """Pixels of the side of a square of that area."""
    most: int
    """The most slices of an image."""

    @property
    def max_tokens(self) -> int:
        count = self.edge / self.side
        return self.most_pictures * math.ceil(count**2 + count * math.sqrt(MOST_RATIO) + 1)  # sides are rounded

    @property
    def most_pictures(self) -> int:
        return self.most + (self.most > 1)

    def fit(self, height: int, width: int) -> Fit:
        check_shape(height, width)
        tall, wide = self._near(height, width)
        count = min(math.ceil(height * width / self.edge**2), self.most)
        if count <= 1:
            return Fit(height=tall, width=wide)
        rows, columns = self._grid(height, width, count)
        tile = self._near(_nearest(height, rows) // rows, _nearest(width, columns) // columns)
        return Fit(height=tall, width=wide, tile=tile, grid=(rows, columns), has_whole_first=True)

    def _near(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides in pixels, in whole tokens, of an image of this shape that has about the rule's area."""
        ratio = width / height
        tall = int(self.edge / math.sqrt(ratio))
        return _nearest(tall, self.side), _nearest(int(tall * ratio), self.side)

    def _grid(self, height: int, width: int, count: int) -> tuple[int, int]:
        """Return the rows and columns of about `count` slices whose shape is nearest to the image's; among equals of
        one number the one with more rows."""
        wanted = math.log(width / height)
        grids = [
            (rows, number // rows)
            for number in (count - 1, count, count + 1)
            if 1 < number <= self.most
            for rows in range(1, number + 1)
            if number % rows == 0
        ]
        best, nearest = grids[0], math.inf
        for grid in grids:
            apart = abs(wanted - math.log(grid[1] / grid[0]))
            if apart < nearest or (apart == nearest and grid[0] > best[0]):
                best, nearest = grid, apart
        return best


def _nearest(length: int, side: int) -> int:
    """Return the multiple of `side`, not 0, that is nearest to a length."""
    return max(round(length / side), 1) * side


def _even(length: int) -> int:
    return length + length % 2
