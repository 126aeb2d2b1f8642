"""WindowRule: cuts images into windows, as Step 3.7 does. It is held to transformers' own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.vision.image_size import Fit, SizeRule, check_shape

_NARROW, _LONG, _LONG_AND_SMALL, _REST = 32, 4, 1.5, 0.2
"""The sides below which images are squared if they are many times as long, the times of those and of small
images that are cut, and the part of a window that is no window of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule(SizeRule):
    """Images are brought to one square, and large and long ones also cut into windows that suit their shape, each
    brought to a smaller square (`_plan_patches` of Step 3.7)."""

    whole: int
    """Pixels of the side of the whole image."""
    tile: int
    """Pixels of the side of a tile, and of the largest window."""
    longest: int
    """The most pixels of a side from which windows are cut."""

    @property
    def most_tiles(self) -> int:
        """The most windows, of which longer images would have more."""
        return ceil_div(self.longest, self.tile) ** 2

    @property
    def most_pictures(self) -> int:
        return 1 + self.most_tiles

    @property
    def max_tokens(self) -> int:
        return (self.whole // self.side) ** 2 + self.most_tiles * (self.tile // self.side) ** 2

    def fit(self, height: int, width: int) -> Fit:
        check_shape(height, width)
        is_squared = min(height, width) < _NARROW and max(height, width) > _LONG * min(height, width)
        fit = Fit(height=self.whole, width=self.whole, is_squared=is_squared)
        if is_squared:
            height = width = max(height, width)
        if (long := max(height, width)) > self.longest:
            height, width = (max(1, int(length * (self.longest / long))) for length in (height, width))
            fit = replace(fit, whole_first=(height, width))
        window = self._window(height, width)
        if not window:
            return fit
        cut = tuple(self._snapped(length, window) for length in (height, width))
        rows, columns = (max(1, length // window) for length in cut)
        if rows * columns > self.most_tiles:
            raise ValueError(f"it is cut into {rows * columns:,} parts; supported: up to {self.most_tiles}")
        return replace(fit, tile=(self.tile, self.tile), grid=(rows, columns), cut=(cut[0], cut[1]))

    def _window(self, height: int, width: int) -> int:
        """Return the side of windows; 0: there are none."""
        short, long = min(height, width), max(height, width)
        if long <= self.whole:
            return short if long / short > _LONG_AND_SMALL else 0
        return min(short, self.tile) if long / short > _LONG else self.tile

    def _snapped(self, length: int, window: int) -> int:
        """Round a side to windows, up if more than a fifth of one is left; a shorter one stays as it is."""
        if length < window:
            return length
        return window * (length // window + (length % window > _REST * window))
