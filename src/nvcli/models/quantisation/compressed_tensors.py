"""compressed-tensors, as LLM Compressor writes it: FP8, unpacked 8-bit integers, integers packed in words, and NVFP4,
MXFP4 and MXFP8."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.quantisation.quantisation import (
    EXPONENTS,
    FP4_PAIRS,
    ONE_BY_ONE,
    WORD_SIZES,
    Quantisation,
    QuantisationFile,
    WeightParts,
)
from nvcli.models.tensor_info import Packing

_MX_GROUP, _NV_GROUP = 32, 16
_MXFP4 = WeightParts(
    codes="weight_packed",
    stored_as=("U8",),
    scales=("weight_scale",),
    scales_stored_as=EXPONENTS,
    packing=FP4_PAIRS,
)
_FP8 = Quantisation(method="compressed-tensors", numbers="fp8", bits=8)
"""FP8 with a scale for each tensor or row."""
_NVFP4 = replace(_MXFP4, scales_stored_as=("F8_E4M3",), factor="weight_global_scale", divides=True)


def read_compressed(config: QuantisationFile) -> Quantisation:
    """Read the kind of weights, which all groups of layers must share, or FP4 beside FP8 with a scale for each tensor
    or row. The groups may differ in their activations, which are ignored."""
    groups = config.values.get("config_groups")
    kinds = {
        _read_group(config.with_values(group, f"{config.section}config_groups.{name}."))
        for name, group in (groups.items() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    }
    if not kinds:
        raise config.error("config_groups", f"{show(groups)} describes no weights")
    fp4 = {kind for kind in kinds if kind.numbers == "fp4"}
    if len(kinds) > 1 and len(fp4) == 1 and kinds - fp4 == {_FP8}:
        kinds = {replace(kind, label=f"{kind.label} and FP8", has_nvfp4_alone=False) for kind in fp4}
    if len(kinds) != 1:
        raise config.error("config_groups", f"{len(kinds)} kinds of weights; supported: one, or FP4 beside FP8")
    return replace(kinds.pop(), left_alone=config.names("ignore"))


def _read_group(group: QuantisationFile) -> Quantisation:
    """Read how the weights of one group of layers are stored."""
    found = group.values.get("weights")
    if not isinstance(found, dict):
        raise group.error("weights", f"{show(found)} does not describe weights")
    weights = group.with_values(found, f"{group.section}weights.")
    is_float = weights.one_of("type", "int", ("float", "int")) == "float"
    bits, size = weights.bits("num_bits", (4, 8) if is_float else WORD_SIZES), weights.group_size(None)
    if is_float and bits == 4:
        return _read_fp4(weights, size)
    needed: tuple[str, ...] = ()
    if not is_float:
        needed = () if weights.get("symmetric", bool, True) else ("weight_zero_point",)
        if found.get("actorder") in ("group", "dynamic", True):
            needed = (*needed, "weight_g_idx")
    return Quantisation(
        method="compressed-tensors",
        numbers="fp8" if is_float else "integer",
        bits=bits,
        label="MXFP8" if is_float and size == _MX_GROUP else None,
        parts=(ONE_BY_ONE,) if is_float else (_words(bits), ONE_BY_ONE),
        weight_block=weights.block("block_structure") if found.get("strategy") == "block" else None,
        group_size=size,
        needed=needed,
    )


def _read_fp4(weights: QuantisationFile, size: int | None) -> Quantisation:
    kinds = {_NV_GROUP: ("NVFP4", _NVFP4), _MX_GROUP: ("MXFP4", _MXFP4)}
    if size not in kinds:
        raise weights.error("group_size", f"{show(size)} is not supported for 4 bits of type float, only 16 and 32")
    label, parts = kinds[size]
    return Quantisation(
        method="compressed-tensors",
        numbers="fp4",
        bits=4,
        label=label,
        parts=(parts, ONE_BY_ONE),
        group_size=size,
        has_nvfp4_alone=size == _NV_GROUP,
    )


def _words(bits: int) -> WeightParts:
    return WeightParts(
        codes="weight_packed",
        stored_as=("I32",),
        scales=("weight_scale",),
        zeros="weight_zero_point",
        groups="weight_g_idx",
        packing=Packing.in_words(bits, 1),
    )
