"""How the numbers of a quantised weight are stored, said without the weight. Torch-free.

A weight is [out, in]. Its codes are small numbers, and a weight's value is (code - zero) × scale, where some neighbours
share a zero and a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale in FP8 checkpoints with block scales (DeepSeek-V3, 2024)."""
FP8_ALIGNMENT = 16
"""Rows and columns of an FP8 weight are multiples of it: the units for FP8 products read 16 bytes at a time."""
FP8_CAPABILITY = (8, 9)
"""The compute capability from which on GPUs have units for FP8 products."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, among eight, of each 4-bit code of an AWQ word, from the lowest bits on."""
WORD_BITS = 32

FP8Scaling = Literal["channel", "block"]
"""What shares a scale in a weight that ranks keep in FP8: a row, or a block of 128 × 128."""


def scale_shape(rows: int, columns: int, scaling: FP8Scaling) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [rows, columns] that ranks keep in FP8."""
    return (rows,) if scaling == "channel" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The way in which the codes of one weight are stored."""

    kind: Literal["scaled", "gptq", "awq", "compressed"]
    """`scaled`: codes [out, in] of 8 bits, one by one. `gptq`: words [in / n, out] of n codes. `awq`: words [in, out /
    n], their codes in AWQ_ORDER. `compressed`: words [out, in / n] (compressed-tensors)."""
    bits: int
    """The size of a code."""
    block: tuple[int, int]
    """(rows, columns) that share a scale; 0 columns: those to which the weight's index of groups gives one number."""
    zero_offset: int = 0
    """What is added to stored zeros."""

    @property
    def codes_per_word(self) -> int:
        return WORD_BITS // self.bits
