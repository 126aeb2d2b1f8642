"""GPTQ: codes in words [in / n, out], each with n neighbours of a row. The first version of its files stores zeros
minus one."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.quantisation.quantisation import ONE_BY_ONE, Quantisation, QuantisationFile, WeightParts
from nvcli.models.tensor_info import Packing


def read_gptq(config: QuantisationFile) -> Quantisation:
    """Read GPTQ's files, and those of GPTQModel."""
    version = config.one_of("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    bits, group_size = config.bits("bits"), config.group_size(128)
    needed = () if config.get("sym", bool, True) else ("qzeros",)
    if config.get("desc_act", bool, False) and group_size is not None:
        needed = (*needed, "g_idx")
    words = WeightParts(
        codes="qweight",
        stored_as=("I32",),
        scales=("scales",),
        zeros="qzeros",
        groups="g_idx",
        packing=Packing.in_words(bits, 1),
        is_transposed=True,
    )
    return Quantisation(
        method="gptq",
        numbers="integer",
        bits=bits,
        parts=(words, ONE_BY_ONE),
        group_size=group_size,
        needed=needed,
        zero_offset=1 if version == "gptq" else 0,
        left_alone=(*config.names("modules_to_not_convert"), *_read_passed_over(config)),
    )


def _read_passed_over(config: QuantisationFile) -> tuple[str, ...]:
    """Read the patterns of layers that GPTQModel skipped: those prefixed with `-:` in `dynamic`."""
    found = config.values.get("dynamic") or {}
    if not isinstance(found, dict):
        raise config.error("dynamic", f"{show(found)} is not an object")
    return tuple(f"re:{name[2:]}" for name in found if name.startswith("-:"))
