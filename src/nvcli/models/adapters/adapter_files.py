"""An adapter's tensors, by the modules that they belong to. Torch-free; reads the header alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.other_checkpoints import ADAPTER_WEIGHTS
from nvcli.models.safetensors_header import read_header
from nvcli.models.tensor_info import TensorInfo

_NAME_CHARS = 160
"""Characters of a name that messages show; PEFT's are long."""
_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer"
_KINDS = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "up of embedding",
    ".lora_embedding_B": "down of embedding",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "rows",
}
"""Suffix of a tensor's name → its role in the module. Any other tensor replaces one of the base model."""
_COPIES = ".modules_to_save.", ".original_module."
"""Parts of names that PEFT saves an embedding under once more, if it is a module to save."""
_MATRICES = {"up": True, "down": False, "up of embedding": False, "down of embedding": True}
"""Matrix → whether the file stores [features, rank] rather than [rank, features]."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of an adapter's tensors, with the size of a number."""
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensors:
    """The tensors that an adapter has for a module."""

    name: str
    """The module's name in transformers."""
    depth: int
    """The number of PEFT wrappers around the parameter; the wrappers of one module are nested."""
    tensors: Mapping[str, TensorInfo]
    """up, down: [rank, features]; bias, magnitude: [features]; rows: [tokens, hidden]."""
    is_embedding: bool

    @property
    def any_tensor(self) -> TensorInfo:
        """One of the tensors, to name its file in messages."""
        return next(iter(self.tensors.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensors:
    """All tensors of an adapter."""

    file: Path
    modules: tuple[ModuleTensors, ...]
    whole: Mapping[str, TensorInfo]
    """Tensors that replace those of the base model, by their names in transformers."""


def read_adapter_tensors(folder: Path) -> AdapterTensors:
    """Read which tensors an adapter has. Raises LoadError for a missing or corrupt file, pickled weights, and tensors
    that are not floating-point or have too many dimensions. What passes can be opened when it is loaded."""
    from safetensors import SafetensorError, safe_open  # numpy, which quick answers do without

    file = folder / ADAPTER_WEIGHTS
    if not os.path.lexists(file):
        hint = "; download the adapter again"
        if (folder / _PICKLED).exists():
            hint = f", but {_PICKLED}, which is pickled and not read: save the adapter again with peft"
        raise LoadError(f"{folder}: no {ADAPTER_WEIGHTS}{hint}")
    groups: dict[tuple[str, int], dict[str, TensorInfo]] = {}
    whole: dict[str, TensorInfo] = {}
    for name, info in read_header(file).items():
        _check_size(info)
        stored = name.removeprefix(_PREFIX)
        end = next((end for end in _KINDS if stored.endswith(end)), None)
        if end is None:
            whole[stored.replace(_BASE_LAYER, "")] = info
            continue
        module, kind = stored.removesuffix(end), _KINDS[end]
        key = module.replace(_BASE_LAYER, ""), module.count(_BASE_LAYER)
        groups.setdefault(key, {})[kind] = _oriented(info, kind)
    try:
        with safe_open(file, framework="np"):  # checks what is left of the header, as when its values are read
            pass
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: corrupt ({error}); download it again") from None
    whole = {name: info for name, info in whole.items() if not _is_copy(name, whole)}
    modules = tuple(_module(*key, tensors) for key, tensors in groups.items())
    if not modules and not whole:
        raise LoadError(f"{file}: has no tensors; train the adapter, or download it again")
    return AdapterTensors(file=file, modules=modules, whole=whole)


def _is_copy(name: str, whole: Mapping[str, TensorInfo]) -> bool:
    return any(part in name and name.replace(part, ".") in whole for part in _COPIES)


def _check_size(info: TensorInfo) -> None:
    """Raise LoadError if a tensor's type is not supported, or its size is not that of its shape."""
    if info.dtype not in _FLOAT_BYTES:
        raise tensor_error(info, f"is stored as {info.dtype}; supported: {', '.join(_FLOAT_BYTES)}")
    wanted = math.prod(info.shape) * _FLOAT_BYTES[info.dtype]
    if info.num_bytes != wanted:
        raise LoadError(
            f"{info.file}: corrupt: tensor {quote(info.name)} has {info.num_bytes:,} bytes, and its shape "
            f"{list(info.shape)} in {info.dtype} takes {wanted:,}; download it again"
        )


def _module(name: str, depth: int, tensors: dict[str, TensorInfo]) -> ModuleTensors:
    is_embedding = any(kind.endswith(" of embedding") for kind in tensors)
    tensors = {kind.removesuffix(" of embedding"): info for kind, info in tensors.items()}
    for kind, other in (("up", "down"), ("down", "up")):
        if kind in tensors and other not in tensors:
            problem = "has no partner, the other matrix of its product; download the adapter again"
            raise tensor_error(tensors[kind], problem)
    return ModuleTensors(name=name, depth=depth, tensors=tensors, is_embedding=is_embedding)


def _oriented(info: TensorInfo, kind: str) -> TensorInfo:
    """Return a tensor of a module, with matrices as [rank, features]."""
    wanted = 2 if kind in _MATRICES or kind == "rows" else 1
    if len(info.shape) != wanted or not all(info.shape):
        raise tensor_error(
            info,
            f"has shape {list(info.shape)}, where {wanted} dimensions belong that are not empty; download the adapter "
            "again, or save it again with all of its shards",
        )
    if _MATRICES.get(kind):
        return replace(info, shape=info.shape[::-1], is_transposed=True)
    return info


def tensor_error(info: TensorInfo, problem: str) -> LoadError:
    """Return the error that names an adapter's file, the tensor and what is wrong with it."""
    return LoadError(f"{info.file}: tensor {quote(info.name)} {problem}")


def quote(name: str) -> str:
    """Return the name of a tensor or module in quotes, for messages."""
    return show(name, _NAME_CHARS)
