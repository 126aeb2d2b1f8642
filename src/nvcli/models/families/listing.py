"""The list of families as `nvcli models` prints it: for people, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from nvcli.models.families.family import Family

_WIDTH = 120
_ADAPTERS = (
    "LoRA adapters saved by PEFT are given along with their base model: -m BASE --lora ADAPTER, as folders or ids on "
    "the hub. Such an adapter is merged into the weights, for every family and format. With --lora NAME=ADAPTER, once "
    "for each, rows choose by name."
)
_QUANTISED = (
    "Quantised checkpoints of every family except gpt-oss, which has MXFP4: FP8, AWQ, GPTQ, bitsandbytes, ModelOpt's "
    "FP8, NVFP4 and MXFP8, and compressed-tensors' W4A16, W8A16, W8A8, FP8, NVFP4, MXFP4 and MXFP8. On GPUs with FP8 "
    "units auto keeps FP8, MXFP8 and the experts of gpt-oss in 8 bits; it keeps 4 bits if memory requires it (NVFP4 "
    "and compressed-tensors' MXFP4 in 8 bits, if those fit), and the rest is loaded as plain weights. --quantization "
    "w4a16 keeps the 4 bits of AWQ, GPTQ, W4A16, NVFP4, GGUF and the MXFP4 of gpt-oss and DeepSeek-V4, w4a8 that MXFP4 "
    "with activations in FP8. --quantization fp8 keeps weights of any checkpoint in 8 bits."
)


def format_families(families: Iterable[Family]) -> str:
    """Format a table: each family with its features, its architectures in config.json, and example ids. After it come
    the formats of quantised checkpoints, and how to give adapters."""
    families = tuple(families)
    width = max(len(family.name) for family in families) + 2
    wrap = textwrap.TextWrapper(
        _WIDTH - width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    ).wrap
    lines = []
    for family in families:
        facts = family.features, ", ".join((*family.architectures, *family.encoders)), ", ".join(family.examples)
        right = [line for fact in facts for line in wrap(fact)]
        left = [family.name, *[""] * (len(right) - 1)]
        lines += [f"{name:{width}}{line}" for name, line in zip(left, right, strict=True)]
    return "\n".join([*lines, "", *textwrap.wrap(_QUANTISED, _WIDTH), "", *textwrap.wrap(_ADAPTERS, _WIDTH)])


def format_families_json(families: Iterable[Family]) -> str:
    """Format a JSON list with an object for each family."""
    keys = ("name", "architectures", "encoders", "features", "examples")
    return json.dumps([{key: getattr(family, key) for key in keys} for family in families], indent=2)
