"""AWQ: 4-bit codes in words [in, out / 8], each with eight neighbours of a column, in an order of its own."""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import ONE_BY_ONE, Quantisation, QuantisationFile, WeightParts
from nvcli.models.tensor_info import Packing

_PARTS = WeightParts(
    codes="qweight",
    stored_as=("I32",),
    scales=("scales",),
    zeros="qzeros",
    groups="g_idx",
    packing=Packing.in_words(4, 0, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    is_transposed=True,
)


def read_awq(config: QuantisationFile) -> Quantisation:
    """Read the layout `gemm`, which nearly all published checkpoints have."""
    key = next((key for key in ("version", "format") if config.values.get(key) is not None), "version")
    config.one_of(key, "gemm", ("gemm",))
    return Quantisation(
        method="awq",
        numbers="integer",
        bits=config.bits("bits", (4,)),
        parts=(_PARTS, ONE_BY_ONE),
        group_size=config.group_size(128),
        needed=("qzeros",) if config.get("zero_point", bool, True) else (),
        left_alone=config.names("modules_to_not_convert"),
    )
