"""PatchGrid: where the patches of images lie, which of them attend to each other, and in what order they are computed.

Patches come in the order of transformers' image processors: token by token, each with the patches of its square, row by
row, or with those of the squares in it that are merged early. With windows, tokens are computed window by window,
windows of one size together, so that attention takes few calls; `inverse` restores their order. An image of tiles
counts as one for each of them. Shapes: P patches and N = P / merge_size² tokens of one image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nvcli.kernels.patch_types import Runs
from nvcli.models.vision.vision_config import HALVING, VisionConfig

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_ENLARGED = 0.1
"""The part of a patch by which a grid counts as larger where positions are interpolated to an enlarged one."""
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """The patches of one image, or of several, one after the other."""

    places: Ints
    """[P, 2], each patch's row and column in its image, in the order in which patches are computed."""
    order: Ints | None
    """[N], the tokens in the order in which they are computed; None: as they come."""
    inverse: Ints | None
    """[N], where each token stands in that order; None: as they come."""
    windows: Runs
    images: Runs
    taps: Ints | None
    """[P, 4] or more, the learned positions from which each patch's own is interpolated, or [P, 2], those of its column
    and row, or [P, 1], the nearest; None: there are none."""
    tap_weights: Floats | None
    """Their weights, of the same shape."""
    middles: Floats
    """[P, 2], the row and column of each patch's middle, from -1 to 1 across its image."""
    neighbours: Ints | None
    """[P, conv_size²], the patches in the square around each, row by row, -1 where the image has ended; None where
    no layer convolves."""
    reads: tuple[Ints, ...] = ()
    """[P, HALVING²], the patches that the convolution of a merger's neck reads, if it has one; [P / 4, HALVING²] and
    [P / 16, HALVING²], the results that the next convolutions read, each of which halves the grid; empty: it has
    none."""

    @property
    def num_patches(self) -> int:
        return len(self.places)


def patch_grid(vision: VisionConfig, grids: Sequence[tuple[int, int]]) -> PatchGrid:
    """Return the patches of images whose grids have these numbers of rows and columns of patches."""
    parts = [_grid_of_image(vision, *grid) for grid in grids]
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(part.num_patches for part in parts)]).tolist()
    unit = vision.merge_size**2

    def joined(arrays: Sequence[Ints | None]) -> Ints | None:
        found = [array + start // unit for array, start in zip(arrays, starts, strict=False) if array is not None]
        return np.concatenate(found) if found else None

    def joined_runs(of_parts: Iterable[Runs]) -> Runs:
        moved = zip(of_parts, starts, strict=False)
        return _runs((first + start, count, size) for runs, start in moved for first, count, size in runs)

    taps = [part.taps for part in parts if part.taps is not None]
    weights = [part.tap_weights for part in parts if part.tap_weights is not None]
    return PatchGrid(
        places=np.concatenate([part.places for part in parts]),
        order=joined([part.order for part in parts]),
        inverse=joined([part.inverse for part in parts]),
        windows=joined_runs(part.windows for part in parts),
        images=joined_runs(part.images for part in parts),
        taps=_widened(taps) if taps else None,
        tap_weights=_widened(weights) if weights else None,
        middles=np.concatenate([part.middles for part in parts]),
        neighbours=_moved([part.neighbours for part in parts if part.neighbours is not None], starts),
        reads=_moved_reads(vision, [part.reads for part in parts], starts),
    )


def _moved(reads: Sequence[Ints], starts: Sequence[int]) -> Ints | None:
    """Concatenate numbers of patches of several images, each of which begins at one of `starts`; None: there are
    none."""
    moved = [np.where(array < 0, -1, array + start) for array, start in zip(reads, starts, strict=False)]
    return np.concatenate(moved) if moved else None


def _moved_reads(vision: VisionConfig, parts: Sequence[tuple[Ints, ...]], starts: Sequence[int]) -> tuple[Ints, ...]:
    """Concatenate `PatchGrid.reads` of several images, whose patches begin at `starts`."""
    has_neck = vision.merger.neck_size > 0
    return tuple(
        moved
        for number, reads in enumerate(zip(*parts, strict=True))
        if (moved := _moved(reads, [start // 4 ** max(0, number - has_neck) for start in starts])) is not None
    )


def _widened(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate rows, which are filled up with zeros to those of the longest."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def _runs(segments: Iterable[tuple[int, int, int]]) -> Runs:
    """Join runs that follow each other and have segments of one size."""
    runs: list[tuple[int, int, int]] = []
    for first, count, size in segments:
        if runs and runs[-1][2] == size and runs[-1][0] + runs[-1][1] * size == first:
            runs[-1] = runs[-1][0], runs[-1][1] + count, size
        else:
            runs.append((first, count, size))
    return tuple(runs)


@lru_cache(maxsize=64)  # the images of a job mostly have few sizes
def _grid_of_image(vision: VisionConfig, rows: int, columns: int) -> PatchGrid:
    merge, tile = vision.merge_size, vision.tile_tokens * vision.merge_size
    num_tiles = rows // tile if tile else 1
    rows //= num_tiles
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    late, early = vision.late_merge, vision.early_merge
    in_squares = (rows // merge, late, early, columns // merge, late, early)
    places = np.stack([axis.reshape(in_squares).transpose(0, 3, 1, 4, 2, 5).ravel() for axis in (row, column)], axis=1)
    starts = [number * len(places) for number in range(num_tiles)]
    order: Ints | None = None
    windows: Runs = ()
    if vision.window_tokens:
        order, windows = _windows(rows // merge, columns // merge, vision.window_tokens, merge**2)
        places = places.reshape(-1, merge**2, 2)[order].reshape(-1, 2)
        order = np.concatenate([order + number * len(order) for number in range(num_tiles)])
        windows = _runs((first + start, count, size) for start in starts for first, count, size in windows)
    reads = _reads(vision, places, rows, columns) if vision.merger.kind == "convolved" else ()
    places = np.tile(places, (num_tiles, 1))
    taps, weights = _interpolation(places, rows, columns, vision)
    return PatchGrid(
        places=places,
        order=order,
        inverse=None if order is None else np.argsort(order),
        windows=windows,
        images=((0, num_tiles, rows * columns),),
        taps=taps,
        tap_weights=weights,
        neighbours=_neighbours(places, places, rows, columns, vision.conv_size) if vision.conv_layers else None,
        reads=_moved_reads(vision, [reads] * num_tiles, starts),
        middles=((2 * places + 1) / np.array([rows, columns]) - 1).astype(np.float32),
    )


def _reads(vision: VisionConfig, places: Ints, rows: int, columns: int) -> tuple[Ints, ...]:
    """Return `PatchGrid.reads` of an image of this size."""
    found = [_neighbours(places, places, rows, columns, HALVING)] if vision.merger.neck_size else []
    for _ in range(2):
        kept = places[(places % 2 == 0).all(axis=1)]
        found.append(_neighbours(places, kept, rows, columns, HALVING))
        places, rows, columns = kept // 2, rows // 2, columns // 2
    return tuple(found)


def _neighbours(places: Ints, middles: Ints, rows: int, columns: int, side: int) -> Ints:
    """Return which of `places` are in the square of this side around each of `middles`, in an image of this size, as
    `PatchGrid.neighbours` are."""
    reach = side // 2
    numbers = np.full((rows + 2 * reach, columns + 2 * reach), -1)
    row, column = places.T
    numbers[row + reach, column + reach] = np.arange(len(places))
    row, column = middles.T
    return np.stack([numbers[row + down, column + right] for down in range(side) for right in range(side)], axis=1)


def _windows(rows: int, columns: int, side: int, unit: int) -> tuple[Ints, Runs]:
    """Return the tokens of a grid window by window, and the runs of windows in patches."""
    tokens = np.arange(rows * columns).reshape(rows, columns)
    found = [
        tokens[top : top + side, left : left + side].ravel()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    found.sort(key=len, reverse=True)
    starts = np.cumsum([0, *map(len, found)]).tolist()
    return np.concatenate(found), _runs(
        (start * unit, 1, len(window) * unit) for start, window in zip(starts, found, strict=False)
    )


def _interpolation(places: Ints, rows: int, columns: int, vision: VisionConfig) -> tuple[Ints | None, Floats | None]:
    """Return the learned positions around each patch, and their bilinear weights
    (`get_vision_interpolation_indices_and_weights` in transformers)."""
    if not vision.num_positions or vision.interpolation in ("bicubic", "resampled"):
        return None, None
    if vision.interpolation in ("axes", "turns"):
        step, second = (1, vision.num_positions) if vision.interpolation == "axes" else (2, 1)
        taps = places[:, ::-1] * step + np.array([0, second])
        return taps, np.ones(taps.shape, dtype=np.float32)
    side = round(vision.num_positions**0.5)
    if vision.interpolation == "faded":  # patch i of a grid has the positions of number i of the turned grid
        places = np.stack(np.divmod(places[:, 0] * columns + places[:, 1], rows), axis=1)
        rows, columns = columns, rows
    if vision.interpolation == "nearest":
        bounds = (np.arange(1, side) / side).astype(np.float32)
        shares = places.astype(np.float32) / np.array([rows, columns], dtype=np.float32)
        row, column = np.searchsorted(bounds, shares, side="right").T
        taps = (row * side + column)[:, None]
        return taps, np.ones(taps.shape, dtype=np.float32)
    if vision.interpolation == "shares":  # rounded as in `Idefics2VisionEmbeddings`
        bounds = (np.arange(1, side) * (1 / side)).astype(np.float32)
        shares = places.astype(np.float32) * (np.float32(1) / np.array([rows, columns], dtype=np.float32))
        row, column = np.searchsorted(bounds, np.minimum(shares, np.float32(1 - 1e-6)), side="right").T
        taps = (row * side + column)[:, None]
        return taps, np.ones(taps.shape, dtype=np.float32)
    axes = []
    for axis, size in enumerate((rows, columns)):
        place = places[:, axis].astype(np.float32)
        if vision.interpolation == "corners":
            at = place * np.float32(side - 1) / np.float32(max(size - 1, 1))
        else:
            across = (max(rows, columns) if vision.interpolation == "cropped" else size) + _ENLARGED * (
                vision.interpolation == "enlarged"
            )
            at = (place + np.float32(0.5)) * np.float32(side) / np.float32(across) - np.float32(0.5)
        reach = max(1.0, side / size) if vision.interpolation == "antialiased" else 1.0
        floor, around = np.floor(at), np.arange(1 - math.ceil(reach), 1 + math.ceil(reach))
        taps = floor.astype(np.int64)[:, None] + around
        weights = np.clip(1 - np.abs((at - floor)[:, None] - around.astype(np.float32)) / np.float32(reach), 0, None)
        if reach > 1:  # over the table's entries alone
            weights *= (taps >= 0) & (taps < side)
            weights /= weights.sum(1, keepdims=True)
        if vision.interpolation == "faded":
            weights *= (taps >= 0) & (taps < side)
        axes.append((np.clip(taps, 0, side - 1), weights.astype(np.float32)))
    (row_taps, row_weights), (column_taps, column_weights) = axes
    return (
        (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(len(places), -1),
        (row_weights[:, :, None] * column_weights[:, None, :]).reshape(len(places), -1),
    )
