"""Intel's AutoRound: weights packed as GPTQ's or AWQ's, under a description of their own.

Source: auto_round/export/export_to_autoround/export.py in intel/auto-round. Layers of other bits or groups than the
rest (`extra_config`) are not read.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.quantisation.awq import read_awq
from nvcli.models.quantisation.gptq import read_gptq
from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile

METHODS = ("auto-round", "intel/auto-round")
_PREFIX = "auto_round:"
_GPTQ = {
    **dict.fromkeys(("auto_gptq", "gptq", "gptq:exllamav2", "gptq:triton"), "gptq"),
    **dict.fromkeys(("auto_round", "exllamav2", "triton", "gptqmodel"), "gptq_v2"),
}
"""Ways of packing → the version of GPTQ's files that stores zeros so."""
_AWQ = ("auto_awq", "awq")
_KINDS = ("bits", "group_size", "sym", "data_type")
_LEFT_ALONE = 16
"""Bits of layers that are not quantised."""


def read_auto_round(config: QuantisationFile) -> Quantisation:
    """Read the files of `--format auto_round`, whose activations are not quantised."""
    key = next((key for key in ("packing_format", "backend") if config.has(key)), "packing_format")
    packing = config.get(key, str, "auto_gptq").lower().removeprefix(_PREFIX)
    if packing not in _GPTQ and packing not in _AWQ:
        allowed = " and ".join(f"{_PREFIX}{name}" for name in ("auto_gptq", "gptqmodel", "auto_awq"))
        raise config.error(key, f"{show(config.values[key])} is not supported, only {allowed}")
    config.one_of("data_type", "int", ("int",))
    if config.get("act_bits", int, _LEFT_ALONE) < _LEFT_ALONE:
        raise config.error("act_bits", f"{config.values['act_bits']}-bit activations are not supported")
    config = config.replacing(modules_to_not_convert=_read_left_alone(config))
    if packing in _AWQ:
        found = read_awq(config.replacing(zero_point=not config.get("sym", bool, True)))
    else:
        found = read_gptq(config.replacing(checkpoint_format=_GPTQ[packing]))
    return replace(found, method=METHODS[0])


def _read_left_alone(config: QuantisationFile) -> list[str]:
    """Read the patterns of layers that are not quantised. Raises LoadError for layers of another kind."""
    layers, left_alone = config.values.get("extra_config") or {}, []
    if not isinstance(layers, dict):
        raise config.error("extra_config", f"{show(layers)} is not an object")
    for name, own in layers.items():
        kind = own if isinstance(own, dict) else {}
        if isinstance(bits := kind.get("bits"), int) and bits >= _LEFT_ALONE:
            left_alone.append(name if re.fullmatch(r"[\w.-]*", name) else f"re:.*(?:{name})")
        elif other := [key for key in _KINDS if kind.get(key, config.values.get(key)) != config.values.get(key)]:
            told = f"{show(kind[other[0]])} of {show(name)} differs from {show(config.values.get(other[0]))}"
            raise config.error(f"extra_config.{other[0]}", f"{told}, and layers of several kinds are not supported")
    return left_alone
