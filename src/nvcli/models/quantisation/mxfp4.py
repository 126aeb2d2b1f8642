"""MXFP4 as in gpt-oss: stacks of all experts in blocks of 32 numbers, each block with an 8-bit exponent."""

from __future__ import annotations

from nvcli.kernels.expert_settings import MXFP4_BLOCK
from nvcli.models.quantisation.quantisation import EXPONENTS, Quantisation, QuantisationFile, WeightParts
from nvcli.models.tensor_info import Packing

_PARTS = WeightParts(
    codes="blocks",
    stored_as=("U8",),
    scales=("scales",),
    scales_stored_as=EXPONENTS,
    packing=Packing(bits=4, dim=1, per_index=MXFP4_BLOCK, block_size=MXFP4_BLOCK // 2),
)
"""Blocks [experts, out, in / 32, 16] with two numbers per byte, and their exponents [experts, out, in / 32]."""


def read_mxfp4(config: QuantisationFile) -> Quantisation:
    """Return the format without reading anything: all its checkpoints are alike."""
    return Quantisation(method="mxfp4", numbers="mxfp4", bits=4, label="MXFP4", parts=(_PARTS,), group_size=MXFP4_BLOCK)
