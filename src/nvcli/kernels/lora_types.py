"""The layout of LoRA adapters' matrices on the device, and the adapter of each row of a step (`lora.py`).

The matrices of all adapters are stored in *pages*, each of which holds `PAGE_RANKS` ranks of every layer (paging as in
S-LoRA, Sheng et al. 2023). An adapter takes as many pages as its rank needs, anywhere in memory, so adapters of
different ranks need no padding to the largest.

Shapes: T rows, `in` and `out` features of a linear layer on this rank, L places for adapters on the device, J
projections that a layer fuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_MOST_ALIGN = 16
RANKS_AT_ONCE = 64
"""Maximum ranks that a program multiplies by at a time."""
BLOCK_FIELDS = 4
"""The int32 words of a block of output features: its first feature, its number of features, its projection, unused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBank:
    """The matrices of the adapters on the device. Place l holds adapter number l + 1 of `AdapterRows`."""

    pages: Tensor
    """[pages, elements], in the model's type: for each layer A [J, PAGE_RANKS, in], then B [PAGE_RANKS, out]."""
    page_table: Tensor
    """[L, maximum pages of an adapter] int32."""
    ranks: Tensor
    """[L, projections of all layers] int32, the rank of each adapter; 0: it does not change the projection."""
    scales: Tensor
    """[L, projections of all layers] float32."""

    @property
    def num_places(self) -> int:
        return self.page_table.shape[0]

    @property
    def max_rank(self) -> int:
        """Maximum rank that the page table has room for (`page_columns`)."""
        return self.page_table.shape[1] * PAGE_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """The position of a linear layer's matrices in the pages."""

    in_features: int
    out_features: int
    first_projection: int
    """The column of its first projection in `AdapterBank.ranks`."""
    num_projections: int
    down_offset: int
    """The first element of A in a page."""
    up_offset: int
    """The first element of B in a page."""
    blocks: Tensor
    """[blocks, BLOCK_FIELDS] int32: the layer's output features, in blocks that belong to one projection each."""
    block_features: int
    """Maximum features of a block."""
    feature_align: int
    """A power of two that divides the first feature and the size of every block."""


class AdapterTiles(NamedTuple):
    """Rows in tiles of one adapter, in the form that kernels take."""

    order: Tensor
    """[tiles, row_tile] int32: the rows of each tile, sorted by adapter, those without one in the last tiles. Rows past
    a tile's count are undefined, and so are tiles past `num_tiles`, here and below."""
    counts: Tensor
    """[tiles] int32: the rows of a tile."""
    pages: Tensor
    """[tiles, maximum pages of an adapter] int32: the pages of the tile's adapter."""
    ranks: Tensor
    """[tiles, projections of all layers] int32: its ranks; 0 for rows without an adapter."""
    scales: Tensor
    """[tiles, projections of all layers] float32."""
    num_tiles: Tensor
    """[2] int32: the number of tiles of rows with adapters, and of all tiles."""


class AdapterRows(NamedTuple):
    """The adapters of a step's tokens, or of those that are kept after the last attention."""

    adapters: Tensor
    """[T] int32: a place on the device, counted from 1; NO_ADAPTER: none."""
    tiles: AdapterTiles | None
    """None on a CPU."""
    row_tile: int
    """Maximum rows of a tile."""
    batch_invariant: bool = False
    """Whether a row's products have the same bits whatever other rows there are."""


class BatchAdapters(NamedTuple):
    """The adapters of a step."""

    tokens: AdapterRows
    kept: AdapterRows
    """The adapters of the tokens that are kept after the last attention."""


def page_columns(max_rank: int) -> int:
    """Return how many pages of an adapter `AdapterBank.page_table` has room for: those of the largest rank, rounded up
    to what the kernels multiply by at a time."""
    pages = ceil_div(max_rank, PAGE_RANKS)
    return (
        next_power_of_2(pages)
        if pages <= RANKS_AT_ONCE // PAGE_RANKS
        else ceil_div(max_rank, RANKS_AT_ONCE) * (RANKS_AT_ONCE // PAGE_RANKS)
    )


def feature_blocks(projections: Sequence[tuple[int, int]], block_features: int) -> tuple[list[list[int]], int]:
    """Return the blocks of a layer's output features, and `AdaptedLayer.feature_align`. projections: (number of
    features, projection) of consecutive runs of features."""
    blocks, first = [], 0
    for num_features, projection in projections:
        for start in range(0, num_features, block_features):
            blocks.append([first + start, min(block_features, num_features - start), projection, 0])
        first += num_features
    align = math.gcd(_MOST_ALIGN, *(number for first, num_features, *_ in blocks for number in (first, num_features)))
    return blocks, align
