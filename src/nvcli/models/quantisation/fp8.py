"""FP8 as transformers writes it (DeepSeek's and Qwen's blocks, or one scale for each tensor or row), maybe beside
experts in MXFP4 (DeepSeek-V4's), and FBGEMM's."""

from __future__ import annotations

from nvcli.kernels.expert_settings import MXFP4_BLOCK
from nvcli.models.quantisation.quantisation import (
    EXPONENTS,
    FP4_PAIRS,
    ONE_BY_ONE,
    Quantisation,
    QuantisationFile,
    WeightParts,
)

_FP4_PARTS = WeightParts(
    codes="weight", stored_as=("I8",), scales=("scale",), scales_stored_as=EXPONENTS, packing=FP4_PAIRS
)
"""Bytes [out, in / 2] of experts, and the exponents of 32 numbers of a row each."""


def read_fp8(config: QuantisationFile) -> Quantisation:
    """Read the block size if config.json gives it; otherwise the scales' shapes tell which weights share one."""
    config.one_of("fmt", "e4m3", ("e4m3",))
    has_blocks = config.values.get("weight_block_size") is not None
    has_fp4 = config.one_of("expert_dtype", "fp8", ("fp8", "fp4")) == "fp4"
    return Quantisation(
        method="fp8",
        numbers="mxfp4" if has_fp4 else "fp8",
        bits=4 if has_fp4 else 8,
        label="FP8 with experts in MXFP4" if has_fp4 else None,
        parts=(_FP4_PARTS, ONE_BY_ONE) if has_fp4 else (ONE_BY_ONE,),
        weight_block=config.block("weight_block_size") if has_blocks else None,
        group_size=MXFP4_BLOCK if has_fp4 else None,
        has_fp8_beside=has_fp4,
        left_alone=config.names("modules_to_not_convert"),
    )


def read_fbgemm(config: QuantisationFile) -> Quantisation:
    """Read FBGEMM's format: a scale for each row."""
    return Quantisation(method="fbgemm_fp8", numbers="fp8", bits=8, left_alone=config.names("modules_to_not_convert"))
