"""FP8 as transformers writes it (DeepSeek's and Qwen's blocks, or one scale for each tensor or row), and FBGEMM's."""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile


def read_fp8(config: QuantisationFile) -> Quantisation:
    """Read the block size if config.json gives it; otherwise the scales' shapes tell which weights share one."""
    config.one_of("fmt", "e4m3", ("e4m3",))
    has_blocks = config.values.get("weight_block_size") is not None
    return Quantisation(
        method="fp8",
        numbers="fp8",
        bits=8,
        weight_block=config.block("weight_block_size") if has_blocks else None,
        left_alone=config.names("modules_to_not_convert"),
    )


def read_fbgemm(config: QuantisationFile) -> Quantisation:
    """Read FBGEMM's format: a scale for each row."""
    return Quantisation(method="fbgemm_fp8", numbers="fp8", bits=8, left_alone=config.names("modules_to_not_convert"))
