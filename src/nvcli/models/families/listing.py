"""The list of families as `nvcli models` prints it: for people, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from nvcli.models.families.family import Family

_WIDTH = 120
_ADAPTERS = (
    "LoRA adapters that PEFT saved are given beside their base model: -m BASE --lora ADAPTER, folders or ids on the "
    "hub; they are merged into the weights, of whatever family and format."
)
_QUANTISED = (
    "Quantised checkpoints of all families but gpt-oss, which has MXFP4: FP8, AWQ, GPTQ, ModelOpt's FP8, NVFP4 and "
    "MXFP8, and compressed-tensors' W4A16, W8A16, W8A8, FP8, NVFP4, MXFP4 and MXFP8. auto keeps FP8 and MXFP8 in 8 "
    "bits on GPUs with FP8 units, and 4 bits where memory asks for it (NVFP4 and compressed-tensors' MXFP4 in 8 bits "
    "then); "
    "the rest is loaded as plain weights. --quantization w4a16 keeps the 4 bits of AWQ, GPTQ, W4A16 and MXFP4; on a "
    "GPU one whole model ran so, of Qwen3-8B's shape. --quantization fp8 keeps weights of any checkpoint in 8 bits."
)


def format_families(families: Iterable[Family]) -> str:
    """Write a table: the family, then what sets it apart, its architectures in config.json, and example ids. Behind it
    stand the formats of quantised checkpoints, and how adapters are given."""
    families = tuple(families)
    width = max(len(family.name) for family in families) + 2
    wrap = textwrap.TextWrapper(
        _WIDTH - width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    ).wrap
    lines = []
    for family in families:
        facts = (family.features, ", ".join(family.architectures), ", ".join(family.examples))
        right = [line for fact in facts for line in wrap(fact)]
        left = [family.name, *[""] * (len(right) - 1)]
        lines += [f"{name:{width}}{line}" for name, line in zip(left, right, strict=True)]
    return "\n".join([*lines, "", *textwrap.wrap(_QUANTISED, _WIDTH), "", *textwrap.wrap(_ADAPTERS, _WIDTH)])


def format_families_json(families: Iterable[Family]) -> str:
    """Write a JSON list with an object for each family."""
    keys = ("name", "architectures", "features", "examples")
    return json.dumps([{key: getattr(family, key) for key in keys} for family in families], indent=2)
