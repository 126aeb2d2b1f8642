"""NVIDIA's ModelOpt: FP8, NVFP4 and MXFP8, and NVFP4 beside FP8. Its scales for activations (`input_scale`) are not
used. Those by which AWQ smooths activations (`pre_quant_scale`) go into the columns of weights."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.kernels.weight_formats import FP8_BLOCK
from nvcli.models.quantisation.quantisation import FP4_PAIRS, ONE_BY_ONE, Quantisation, QuantisationFile, WeightParts

QUANTISATION_FILE = "hf_quant_config.json"
"""The file that says how a checkpoint is quantised, where config.json does not."""
_FP8_BLOCKS = "FP8_PB_WO"
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", _FP8_BLOCKS)
_BARE_FP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_W4A16")
_FP4 = (*_BARE_FP4, "NVFP4_AWQ")
_MXFP8, _MIXED = "MXFP8", "MIXED_PRECISION"
_FP4_PARTS = WeightParts(
    codes="weight",
    stored_as=("U8",),
    scales=("weight_scale",),
    scales_stored_as=("F8_E4M3",),
    factor="weight_scale_2",
    packing=FP4_PAIRS,
    columns="pre_quant_scale",
)
"""Bytes [out, in / 2], a scale in e4m3 for each 16 numbers of a row, and one in float32 for all of them."""


def read_modelopt(config: QuantisationFile) -> Quantisation:
    """Read the algorithm and the unquantised layers, which versions of ModelOpt list under two different keys."""
    algorithms = _read_algorithms(config)
    has_fp4 = not algorithms.isdisjoint(_FP4)
    label, group_size = None, None
    if has_fp4:
        label, group_size = "NVFP4" if algorithms.isdisjoint(_FP8) else "NVFP4 and FP8", 16
    elif _MXFP8 in algorithms:
        label, group_size = "MXFP8", 32
    return Quantisation(
        method="modelopt",
        numbers="fp4" if has_fp4 else "fp8",
        bits=4 if has_fp4 else 8,
        label=label,
        parts=(_FP4_PARTS, ONE_BY_ONE),
        weight_block=(FP8_BLOCK, FP8_BLOCK) if _FP8_BLOCKS in algorithms else None,
        group_size=config.group_size(group_size),
        has_nvfp4_alone=algorithms <= set(_BARE_FP4),
        left_alone=config.names("ignore", "exclude_modules"),
    )


def _read_algorithms(config: QuantisationFile) -> set[str]:
    """Read the algorithms of all layers. Raises LoadError for one that is not supported."""
    found = {config.get("quant_algo", str).upper()}
    if found == {_MIXED}:
        layers = config.values.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise config.error("quantized_layers", f"{show(layers)} does not say how layers are quantised")
        found = {str(layer.get("quant_algo")).upper() for layer in layers.values()}
    mixable = (*_FP8, *_FP4)
    if others := sorted(found.difference((*mixable, _MXFP8) if len(found) == 1 else mixable)):
        raise config.error(
            "quant_algo",
            f"{show(others[0])} is not supported, only {', '.join((*mixable, _MXFP8))}, and {_MIXED} of all but the "
            "last; use the model's bfloat16 or float16 checkpoint, or one in another format that `nvcli models` lists",
        )
    return found
