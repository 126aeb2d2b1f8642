"""The operands of products in Triton: tiles of activations and weights, which are loaded, turned into numbers that the
matrix units take, and multiplied. Products of linear layers and of experts share them.

A tile of a result is [rows, features], or without ROWS_FIRST [features, rows]: Hopper's units take 64 or more rows of
their first operand and as few as 8 of their second.

The bits of an FP8 code, put where a larger type has such ones, are a power of two too small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.expert_types import WeightKind
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.weight_formats import AFFINE_KINDS, W4_WORD_BITS, W4Kind, code_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TileKind:
    """The constants of a product of two tiles (`tile_product.py`). Kernels take it as one constant."""

    weight: WeightKind
    group: int
    """Neighbours of a row of the weight that share a scale, where they do."""
    row_block: int = 1
    """In 4 bits, how many rows' words of a tile follow one another (`kernels/w4.py`)."""
    is_quantised: bool
    """Whether the activations are in FP8, with scales."""
    is_gated: bool
    row_tile: int
    out_tile: int
    in_tile: int
    rows_first: bool
    """Whether a tile of the result is [rows, features]; else [features, rows]."""
    x_by_tma: bool
    weight_by_tma: bool
    is_whole: bool
    """Whether the last tile of input features is full, or TMA fills it up."""
    is_packed: bool
    """Whether codes of 4 bits become numbers two at a time, by inline assembly; not in the interpreter."""
    num_stages: int

    @property
    def is_in_4_bits(self) -> bool:
        """Whether the weight is words of codes."""
        return self.weight in get_args(W4Kind)

    @property
    def parts(self) -> int:
        """Codes of a word."""
        return W4_WORD_BITS // code_bits(self.weight)

    @property
    def is_affine(self) -> bool:
        """Whether groups of codes have scales and offsets."""
        return self.weight in AFFINE_KINDS

    @property
    def has_row_factors(self) -> bool:
        """Whether the sums of a row of the weight are multiplied by a number of its own."""
        return self.weight in ("channel", "nvfp4", "mxfp4 for fp8")


@triton.jit
def zeros(ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """Return the sums of a tile to begin with: [rows, features], or without ROWS_FIRST [features, rows]."""
    return tl.zeros([ROW_TILE, OUT_TILE] if ROWS_FIRST else [OUT_TILE, ROW_TILE], tl.float32)


@triton.jit
def dot(x, weight, total, ROWS_FIRST: tl.constexpr, MAX_IMPRECISE: tl.constexpr):
    """Add x Wᵀ of two tiles, [rows, inner] and [features, inner], to the sums `total` (see `zeros`). MAX_IMPRECISE
    products are added up by FP8 units; None: there are none."""
    first, second = (x, as_factors(weight, x.dtype)) if ROWS_FIRST else (as_factors(weight, x.dtype), x)
    return tl.dot(first, second.T, total, max_num_imprecise_acc=MAX_IMPRECISE, input_precision="ieee")


@triton.jit
def scaled_dot(x, weight, scales, total, ROWS_FIRST: tl.constexpr):
    """Add x Wᵀ of two tiles, times a scale for each row, to the sums `total`."""
    if ROWS_FIRST:
        total += tl.dot(x, as_factors(weight, x.dtype).T, input_precision="ieee") * scales[:, None]
    else:
        total += tl.dot(as_factors(weight, x.dtype), x.T, input_precision="ieee") * scales[None, :]
    return total


@triton.jit
def as_factors(weight, DTYPE: tl.constexpr):
    """Return a tile of a weight as the numbers of a product with DTYPE: e4m3 unchanged, or its bits in uint8 converted
    to DTYPE."""
    if weight.dtype == tl.uint8:
        if tl.float32 == DTYPE:
            codes = weight.to(tl.uint32)
            bits = ((codes & 128) << 24) | ((codes & 127) << 20)
            factors = bits.to(tl.float32, bitcast=True) * 2.0**120
        elif tl.bfloat16 == DTYPE:
            codes = weight.to(tl.uint16)
            bits = ((codes & 128) << 8) | ((codes & 127) << 4)
            factors = bits.to(tl.bfloat16, bitcast=True) * tl.full([], 2.0**120, tl.bfloat16)
        else:
            codes = weight.to(tl.uint16)
            bits = ((codes & 128) << 8) | ((codes & 127) << 7)
            factors = bits.to(tl.float16, bitcast=True) * tl.full([], 2.0**8, tl.float16)
    else:
        factors = weight
    return factors


@triton.jit
def load_row_scales(pointers, has_row, QUANTISED: tl.constexpr):
    """Load the scales of rows of activations, which are 1 unless they are quantised."""
    scales = has_row.to(tl.float32)
    if QUANTISED:
        scales = tl.load(pointers, mask=has_row, other=0.0)
    return scales


@triton.jit
def per_row(values, ROWS_FIRST: tl.constexpr):
    """Return one value for each row in the shape that a tile of a result takes: [rows, 1] or [1, rows]."""
    return values[:, None] if ROWS_FIRST else values[None, :]


@triton.jit
def per_feature(values, ROWS_FIRST: tl.constexpr):
    """Return one value for each feature in the shape that a tile of a result takes: [1, features] or [features, 1]."""
    return values[None, :] if ROWS_FIRST else values[:, None]


def codes_for(x: Activations, weight: Tensor) -> Tensor:
    """Return an FP8 weight in the type for its activations: e4m3 for quantised ones, its bits for plain ones."""
    return weight if isinstance(x, QuantisedRows) else weight.view(torch.uint8)


def has_rows_first(row_tile: int, out_tile: int) -> bool:
    """Whether a tile's rows are the first operand of FP8 units, which take 64 or more of it."""
    return 64 <= row_tile <= out_tile or out_tile < 64
