"""The choice of a checkpoint's format by its config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile
from nvcli.models.quantisation.auto_round import METHODS as AUTO_ROUND
from nvcli.models.quantisation.auto_round import read_auto_round
from nvcli.models.quantisation.awq import read_awq
from nvcli.models.quantisation.bitnet import read_bitnet
from nvcli.models.quantisation.bitsandbytes import read_bitsandbytes
from nvcli.models.quantisation.compressed_tensors import read_compressed
from nvcli.models.quantisation.fp8 import read_fbgemm, read_fp8
from nvcli.models.quantisation.gguf import METHODS, read_gguf
from nvcli.models.quantisation.gptq import read_gptq
from nvcli.models.quantisation.modelopt import read_modelopt
from nvcli.models.quantisation.mxfp4 import read_mxfp4
from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile

_KEYS, _MODELOPT = ("quantization_config", "compression_config"), "quantization"
_OF_EXPERTS = "expert_dtype"
"""The type of experts, which files may have beside the section."""
_SUPPORTED = "fp8, fbgemm_fp8, compressed-tensors, modelopt, awq, gptq, auto-round, bitnet or bitsandbytes"
_OTHERS = {
    "aqlm": "codebooks of AQLM",
    "exl2": "ExLlamaV2's format",
    "exl3": "ExLlamaV3's format",
    "gguf": "llama.cpp's format",
    "hqq": "HQQ's format",
}
"""Well-known formats that are not read."""
_READERS: Mapping[str, Callable[[QuantisationFile], Quantisation]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "modelopt": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    **dict.fromkeys(AUTO_ROUND, read_auto_round),
    "compressed-tensors": read_compressed,
    "bitsandbytes": read_bitsandbytes,
    "bitnet": read_bitnet,
}
_OF_FAMILIES = {"mxfp4": read_mxfp4}
"""Formats of families that support no others, but for those of GGUF files."""


def read_quantisation(
    config: JsonFile, text: JsonFile, modelopt: JsonFile, methods: tuple[str, ...] = ()
) -> Quantisation | None:
    """Read how a checkpoint is quantised, from config.json, its section for text, or ModelOpt's own file, which may be
    empty; None if it is not quantised.

    `methods` are the formats that belong to the model's family; empty: it has those of most families. Raises LoadError
    naming the method if it is not supported.
    """
    file, key = next(
        ((file, key) for file in (config, text) for key in _KEYS if file.values.get(key)), (modelopt, _MODELOPT)
    )
    found = file.values.get(key)
    if not found:
        return None
    method = found.get("quant_method", "modelopt" if file is modelopt else None) if isinstance(found, dict) else found
    if method == "modelopt" and isinstance(found, dict):
        if isinstance(found.get(_MODELOPT), dict):  # as in its own file
            found, key = found[_MODELOPT], f"{key}.{_MODELOPT}"
        if found.get("quant_algo") is None:
            return None  # the KV cache alone is quantised
    own = {name: _OF_FAMILIES[name] for name in methods} or _READERS
    readers = {**own, **dict.fromkeys(METHODS, read_gguf)}
    reader = readers.get(method) if isinstance(method, str) and isinstance(found, dict) else None
    if reader is None:
        if isinstance(found, dict) and method is None:
            raise file.error(f"{key}.quant_method", f"missing{_instead(None, methods)}")
        raise file.error(key, f"quantised weights ({show(method)}) are not supported{_instead(method, methods)}")
    if file.has(_OF_EXPERTS):
        found = {_OF_EXPERTS: file.values[_OF_EXPERTS], **found}
    return reader(QuantisationFile(file.path, found, f"{file.section}{key}.", file.changed))


def _instead(method: object, methods: tuple[str, ...]) -> str:
    """Return the end of a message: what to use in place of an unsupported method."""
    known = _OTHERS.get(method) if isinstance(method, str) else None
    return (
        f"{'' if known is None else f': {known}'}; use the model's bfloat16 or float16 checkpoint, with `quantization: "
        f"fp8` for half the memory, or one quantised with {' or '.join(methods) or _SUPPORTED}"
    )
