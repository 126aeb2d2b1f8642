"""compressed-tensors, as LLM Compressor writes it: FP8, integers of 8 bits one by one, and integers in words."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.quantisation.quantisation import (
    ONE_BY_ONE,
    WORD_SIZES,
    Quantisation,
    QuantisationFile,
    WeightParts,
)
from nvcli.models.tensor_info import Packing


def read_compressed(config: QuantisationFile) -> Quantisation:
    """Read the one kind of weights that all groups of layers have; those of activations may differ, and do not
    matter."""
    groups = config.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.error("config_groups", f"{show(groups)} describes no weights")
    kinds = {
        _read_group(config.with_values(group, f"{config.section}config_groups.{name}."))
        for name, group in groups.items()
        if isinstance(group, dict)
    }
    if len(kinds) != 1:
        raise config.error("config_groups", f"{len(kinds)} kinds of weights; supported: one")
    return replace(kinds.pop(), left_alone=config.names("ignore"))


def _read_group(group: QuantisationFile) -> Quantisation:
    """Read how the weights of one group of layers are stored."""
    found = group.values.get("weights")
    if not isinstance(found, dict):
        raise group.error("weights", f"{show(found)} does not describe weights")
    weights = group.with_values(found, f"{group.section}weights.")
    kind = weights.one_of("type", "int", ("float", "int"))
    bits = weights.bits("num_bits", (8,) if kind == "float" else WORD_SIZES)
    needed: tuple[str, ...] = ()
    if kind == "int":
        needed = () if weights.get("symmetric", bool, True) else ("weight_zero_point",)
        if found.get("actorder") in ("group", "dynamic", True):
            needed = (*needed, "weight_g_idx")
    return Quantisation(
        method="compressed-tensors",
        numbers="fp8" if kind == "float" else "integer",
        bits=bits,
        parts=(_words(bits), ONE_BY_ONE),
        weight_block=weights.block("block_structure") if found.get("strategy") == "block" else None,
        group_size=weights.group_size(None),
        needed=needed,
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
