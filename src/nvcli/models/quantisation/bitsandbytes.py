"""bitsandbytes: NF4 and FP4 in blocks of the flattened weight, and 8-bit integers with a scale for each row.

Weights are read as the numbers that they stand for, and activations stay plain; bitsandbytes itself quantises these to
8 bits beside weights of 8 bits.
"""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import FlatParts, Quantisation, QuantisationFile, WeightParts

_KINDS = ("nf4", "fp4")
_INT8 = WeightParts(codes="weight", stored_as=("I8",), scales=("SCB",), unit=1 / 127)
"""Codes [out, in], and the largest number of each row."""


def read_bitsandbytes(config: QuantisationFile) -> Quantisation:
    """Read whether weights have 4 or 8 bits."""
    left_alone = config.names("llm_int8_skip_modules")
    if not _is_set(config, "load_in_4bit"):
        if not _is_set(config, "load_in_8bit"):
            raise config.error("load_in_4bit", "neither this nor `load_in_8bit` is true")
        return Quantisation(
            method="bitsandbytes",
            numbers="integer",
            bits=8,
            label="bitsandbytes, 8 bits",
            parts=(_INT8,),
            left_alone=left_alone,
        )
    kind = config.one_of("bnb_4bit_quant_type", "fp4", _KINDS)
    config.one_of("bnb_4bit_quant_storage", "uint8", ("uint8",))
    flat = FlatParts(
        table="weight.quant_map",
        nested_table="weight.nested_quant_map",
        nested_scales="weight.nested_absmax",
        state=f"weight.quant_state.bitsandbytes__{kind}",
    )
    return Quantisation(
        method="bitsandbytes",
        numbers="table",
        bits=4,
        label=f"bitsandbytes, {kind.upper()}",
        parts=(WeightParts(codes="weight", stored_as=("U8",), scales=("weight.absmax",), flat=flat),),
        left_alone=left_alone,
    )


def _is_set(config: QuantisationFile, key: str) -> bool:
    """Read a key, which older files write with an underscore before it."""
    return config.get(key, bool, config.get(f"_{key}", bool, False))
