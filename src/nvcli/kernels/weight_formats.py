"""How ranks keep quantised weights. Torch-free.

A weight is [out, in]. Its codes are small numbers, and a weight's value is (code - zero) × scale, where some neighbours
share a zero and a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from nvcli.kernels.expert_settings import MXFP4_BLOCK
from nvcli.kernels.whole_numbers import ceil_div

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale in FP8 checkpoints with block scales (DeepSeek-V3, 2024)."""
FP8_ALIGNMENT = 16
"""Rows and columns of an FP8 weight are multiples of it: the units for FP8 products read 16 bytes at a time."""
FP8_CAPABILITY = (8, 9)
"""The compute capability from which on GPUs have units for FP8 products."""

W4_WORD_BITS = 16
"""Bits of a word, which has four codes of 4 bits or two of 8 (`kernels/w4.py`)."""
_PART = 32
"""The most words of a tile. Fewer are as many as a group has columns, so that groups have whole parts."""
ROW_BLOCK = 32
"""How many rows' words of a tile follow one another: a program that reads 64-byte pieces of many rows gets less of the
memory's bandwidth. With 64 an H200 takes up to a quarter longer for few rows."""
CONVERTED_ROWS = 1 << 15
"""The most rows of a weight for a plain product that are in 16 bits in memory at a time. LM heads have more: all of one
would take more than the head itself."""
NVFP4_BLOCK = 16
"""How many neighbours of a row share a scale in NVFP4."""
W4_GROUPS = (128, 64, 32)
"""How many neighbours of a row may share a scale in such a weight of integers, the most first."""
AFFINE_GROUPS = (32, 16)
"""How many may share a scale and an offset, the most first."""

FP8Scaling = Literal["channel", "block"]
"""The part of a weight in FP8 that shares a scale: a row, or a block of 128 × 128."""

W4Kind = Literal["integer", "affine", "affine in 8 bits", "mxfp4", "mxfp4 for fp8", "nvfp4"]
"""The kind of codes of 4 bits: integers, or numbers of FP4 with the scales of one of its formats. "affine": integers
whose groups have offsets that are no multiples of their scales, as GGUF's have; beside them there may be some of 8
bits. "mxfp4 for fp8": numbers are multiplied by activations in FP8 and become FP8 themselves."""
AFFINE_KINDS: tuple[W4Kind, ...] = ("affine", "affine in 8 bits")
MXFP4_KINDS: tuple[W4Kind, ...] = ("mxfp4", "mxfp4 for fp8")
"""The kinds of MXFP4, which only experts have."""


def code_bits(kind: str) -> int:
    """Return the bits of a code of a `W4Kind`."""
    return 8 if kind == "affine in 8 bits" else 4


def scale_shape(rows: int, columns: int, scaling: FP8Scaling) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [rows, columns] that ranks keep in FP8."""
    return (rows,) if scaling == "channel" else (ceil_div(rows, FP8_BLOCK), ceil_div(columns, FP8_BLOCK))


@dataclass(frozen=True, slots=True)
class W4Format:
    """How ranks keep a weight [out, in] in 4 bits: as words and scales (`kernels/w4.py`)."""

    kind: W4Kind
    group: int
    """How many neighbours of a row share a scale: one of W4_GROUPS or AFFINE_GROUPS, MXFP4_BLOCK or NVFP4_BLOCK."""
    row_block: int = ROW_BLOCK
    """How many rows' words of a tile follow one another. Weights have whole blocks, and so have their parts."""

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return code_bits(self.kind)

    @property
    def parts(self) -> int:
        """Codes of a word."""
        return W4_WORD_BITS // self.bits

    @property
    def zero(self) -> int:
        """The code that stands for the offset of its group, where groups have offsets."""
        return 1 << (self.bits - 1)

    @property
    def part(self) -> int:
        """The words of a tile: as many neighbours of a row are in the same bits of their words, and groups have whole
        parts."""
        return min(self.group, _PART)

    @property
    def tile(self) -> int:
        """Columns of a weight that stand in the same words."""
        return self.parts * self.part

    @property
    def has_group_scales(self) -> bool:
        """Whether each group has a word of scales; else a tile has one."""
        return self.kind == "integer" or self.kind in AFFINE_KINDS

    @property
    def has_row_factors(self) -> bool:
        """Whether the sums of a row are multiplied by a factor of its own."""
        return self.kind in ("nvfp4", "mxfp4 for fp8")

    def for_rows(self, *rows: int) -> W4Format:
        """Return the format of a weight whose parts have this many rows each, with the largest blocks that divide
        them."""
        return replace(self, row_block=math.gcd(self.row_block, *rows))

    def words_of_row(self, columns: int) -> int:
        """Count the 16-bit words of a row of `columns`."""
        return ceil_div(columns, self.tile) * self.part

    def scales_of_row(self, columns: int) -> int:
        """Count the words of 32 bits that hold a row's scales: one for each group, or of FP4 for the four groups of a
        tile, and one for the row if it has a factor."""
        return self.has_row_factors - (-columns // (self.group if self.has_group_scales else self.tile))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Count the bytes of a weight [rows, columns]."""
        return rows * (2 * self.words_of_row(columns) + 4 * self.scales_of_row(columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups:
    """How a checkpoint has a weight in 4 bits."""

    kind: W4Kind
    size: int | None
    """How many columns of a row share a scale; None: all."""
    has_order: bool = False
    """Whether the columns of a group do not follow each other. Ranks then keep them in another order."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The groups that ranks can keep, the largest first."""
        if self.kind == "integer":
            return W4_GROUPS
        if self.kind in AFFINE_KINDS:
            return AFFINE_GROUPS
        return (NVFP4_BLOCK if self.kind == "nvfp4" else MXFP4_BLOCK,)

    def kept(self, columns: int, *rows: int) -> W4Format | None:
        """Return how a rank keeps `columns` of a weight, from a multiple of this many on: with the largest groups that
        neither a group nor the cut ends in. `rows`: those of the weight's parts. None: there are none."""
        fitting = (size for size in self.sizes if columns % size == 0 and (self.size is None or self.size % size == 0))
        group = next(fitting, None)
        return None if group is None else W4Format(self.kind, group).for_rows(*rows)
