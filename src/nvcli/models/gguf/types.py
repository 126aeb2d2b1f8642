"""The types of tensors in GGUF files: how many numbers a block of each has, and how many bytes. Torch-free.

The numbers are those of `ggml_type` (github.com/ggml-org/llama.cpp/blob/master/ggml/include/ggml.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TensorType(NamedTuple):
    name: str
    """ggml's; for plain numbers, safetensors' too."""
    block: int
    """How many neighbours of a row share scales; 1: the numbers are plain."""
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    number: TensorType(name, block, block_bytes)
    for number, name, block, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (41, "Q1_0", 128, 18),
    )
}


class AffineType(NamedTuple):
    """Blocks whose numbers are code × scale + minimum."""

    bits: int
    """The size of a code."""
    group: int
    """How many neighbours of a row share a scale and a minimum."""

    @property
    def zero(self) -> int:
        """The code in the middle."""
        return 1 << (self.bits - 1)


AFFINE_TYPES: Mapping[str, AffineType] = {
    "Q4_0": AffineType(4, 32),
    "Q4_1": AffineType(4, 32),
    "Q5_0": AffineType(5, 32),
    "Q5_1": AffineType(5, 32),
    "Q8_0": AffineType(8, 32),
    "Q2_K": AffineType(2, 16),
    "Q3_K": AffineType(3, 16),
    "Q4_K": AffineType(4, 32),
    "Q5_K": AffineType(5, 32),
    "Q6_K": AffineType(6, 16),
    "IQ4_NL": AffineType(8, 32),
    "IQ4_XS": AffineType(8, 32),
}
"""Types that ranks can keep. The codes of IQ4 are places in a table of numbers of 8 bits, which take their place."""
BLOCK_TYPES: Mapping[str, TensorType] = {one.name: one for one in TENSOR_TYPES.values() if one.block > 1}
"""Types whose numbers are codes, by their names."""
