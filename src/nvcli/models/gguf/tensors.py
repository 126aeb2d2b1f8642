"""The tensors of a GGUF file, under the decoder's names and as the rest of the loader reads them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from nvcli.models.gguf.architectures import Architecture, find_architecture, layer_of
from nvcli.models.gguf.files import part_names
from nvcli.models.gguf.header import GGUFHeader, GGUFTensor, read_header
from nvcli.models.gguf.settings import Settings, is_setting, read_settings
from nvcli.models.safetensors_header import unreadable
from nvcli.models.tensor_info import GGUFForm, StoredTensor, TensorInfo, fused_places

_KEYS, _VALUES, _BOTH = ("k_b_proj", "v_b_proj", "kv_b_proj")
"""The projections from latents in files, and the one that a model has."""
_FUSED = ".in_proj_ba"
_OF_GROUPS = (".mamba.norm.weight", ".mixer.norm.weight")
"""Norms that files have as matrices with a row for each group."""
_VECTORS, _CONVOLUTIONS, _POWER = ".shared_expert_gate.weight", ("conv1d.weight", ".conv.conv.weight"), ".A_log"
"""Tensors that files have without a dimension of 1, and numbers that they have as powers."""


def read_model_header(first: Path, *, with_vocabulary: bool = False) -> GGUFHeader:
    """Read the header of a whole model, whose first or only file is given. Raises LoadError."""
    header = read_header(first, with_vocabulary=with_vocabulary)
    tensors = dict(header.tensors)
    for name in part_names(first.name)[1:]:
        tensors |= read_header(first.with_name(name)).tensors
    return GGUFHeader(first, header.metadata, tensors)


def read_gguf(file: Path) -> dict[str, TensorInfo]:
    """Read the entry of every tensor of one file, but of a head that drafts tokens. What is said of the model is in the
    first of its parts. Raises LoadError for a file that is missing, truncated or corrupt, and for an architecture that
    is not supported."""
    header, first = read_header(file), file.with_name(part_names(file.name)[0])
    of_model = header if first == file else _read_first(first, *_identity(first))
    name, architecture = find_architecture(of_model)
    settings = read_settings(of_model, name)
    infos = (
        part
        for tensor in header.tensors.values()
        if not is_setting(tensor.name) and layer_of(tensor.name) < settings.num_layers
        for part in _parts(_info(tensor, architecture, settings), settings)
    )
    return {info.name: info for info in infos}


@lru_cache(maxsize=1)  # each part of a model asks for it
def _read_first(file: Path, size: int, changed: int) -> GGUFHeader:
    """Read the header of a model's first part, which has this size and time of its last change."""
    return read_header(file)


def _identity(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise unreadable(file, error) from None
    return found.st_size, found.st_ctime_ns


def _parts(info: TensorInfo, settings: Settings) -> Iterator[TensorInfo]:
    """Yield a tensor, or the two that Qwen3-Next's files fuse, for each key head."""
    first, *others = separate_names(info.name.removesuffix(".weight"))
    if not others:
        yield info
        return
    rows = info.shape[0] // 2
    places = fused_places([rows, rows], settings.keys.positive("ssm.group_count"))
    for module, part in zip((first, *others), places, strict=True):
        name = f"{module}.weight"
        yield replace(info, name=name, shape=(rows, *info.shape[1:]), num_bytes=info.num_bytes // 2, rows=part)


def separate_names(module: str) -> tuple[str, ...]:
    """Return the names of the modules that a file's module fuses, or its own."""
    parent = module.removesuffix(_FUSED)
    return (module,) if parent == module else (f"{parent}.in_proj_b", f"{parent}.in_proj_a")


def join_latents(found: dict[str, TensorInfo]) -> None:
    """Replace the two projections from latents in `found`, by the decoder's names, with the one that they are. Raises
    LoadError if they do not fit together."""
    for name in [name for name in found if f".{_KEYS}." in name]:
        keys, values = found[name], found.get(name.replace(_KEYS, _VALUES))
        if values is None:
            continue
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
            raise keys.error(f"has shape {list(keys.shape)}, which does not fit {list(values.shape)} of {values.name}")
        heads, latents, _ = keys.shape
        del found[name], found[values.name]
        joined = name.replace(_KEYS, _BOTH)
        if joined not in found:  # some files have it besides
            found[joined] = TensorInfo(
                file=keys.file,
                name=joined,
                shape=(heads * (keys.shape[2] + values.shape[1]), latents),
                dtype="F32",
                num_bytes=keys.num_bytes + values.num_bytes,
                form=GGUFForm(parts=(_flat(keys), _flat(values))),
            )


def _flat(info: TensorInfo) -> TensorInfo:
    """Return a stack of matrices as one matrix, each below the other."""
    assert info.stored is not None
    shapes = [(shape[0] * shape[1], shape[2]) for shape in (info.shape, info.stored.shape)]
    return replace(info, shape=shapes[0], stored=replace(info.stored, shape=shapes[1]))


def _info(tensor: GGUFTensor, architecture: Architecture, settings: Settings) -> TensorInfo:
    kind, shape = tensor.type, tensor.shape
    name = architecture.decoder_name(tensor.name)
    if name.endswith(_VECTORS) and len(shape) == 1:
        shape = (1, *shape)
    elif name.endswith(_CONVOLUTIONS) and len(shape) in (2, 4):
        shape = (math.prod(shape[:-1]), 1, shape[-1])
    elif name.endswith(_OF_GROUPS) and len(shape) == 2:
        shape = (shape[0] * shape[1],)
    is_blocks = kind.block > 1
    stored = (*shape[:-1], shape[-1] // kind.block * kind.block_bytes) if is_blocks else shape
    form = GGUFForm(
        blocks=kind.name if is_blocks else None,
        rows=architecture.row_order(tensor, settings),
        columns=architecture.column_order(tensor, settings),
        offset=architecture.offset(tensor),
        is_power=name.endswith(_POWER),
    )
    return TensorInfo(
        file=tensor.file,
        name=name,
        shape=shape,
        dtype=kind.name,
        num_bytes=tensor.num_bytes,
        stored=StoredTensor(tensor.offset, stored, "U8" if is_blocks else kind.name),
        form=None if form == GGUFForm() else form,
    )
