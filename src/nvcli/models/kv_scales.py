"""A checkpoint's scales for an FP8 KV cache, and the names that they have. Torch-free.

A layer has one scale for all its keys and one for all its values; a cached number is an e4m3 number times its scale.
The names are those of compressed-tensors and ModelOpt, and those to which vLLM maps older ones
(`maybe_remap_kv_scale_name` in vllm/model_executor/model_loader/weight_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nvcli.models.tensor_info import TensorInfo

_SCALE = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<kind>[kv])_scale|(?P<fused>(?:attn\.)?kv_scale)"
    r"|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale))"
)
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:attn\.)?(?:q|prob)_scale")
"""The scales of queries and of softmax weights, which are not quantised here."""


def is_kv_scale(name: str) -> bool:
    """Whether the decoder's name of a tensor is that of a scale of keys, values, queries or softmax weights."""
    return _SCALE.fullmatch(name) is not None or _UNUSED.fullmatch(name) is not None


def find_kv_scales(tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Return the scales among `tensors` (the decoder's name → tensor), by layer number: that of keys as `k`, that of
    values as `v`.

    A scale for both keys and values serves whichever has none of its own.
    """
    found: dict[int, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _SCALE.fullmatch(name)
        if match is None:
            continue
        scales = found.setdefault(int(match["layer"]), {})
        if match["fused"]:
            for kind in "kv":
                scales.setdefault(kind, info)
        else:
            scales[match["kind"] or match["projection"]] = info
    return found
