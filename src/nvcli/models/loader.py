"""Weights from a checkpoint folder into a model that was built on the meta device.

What goes where is declared by the layers (`weights.py`); here are files, threads and the checks that every tensor is
there, has the shape the model expects and is used. Only this rank's slices are read, straight into the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nvcli.errors import LoadError
from nvcli.models.causal_lm import CausalLM
from nvcli.models.checkpoint import TensorInfo, read_tensors
from nvcli.models.weights import DerivedModule, WeightModule, WeightSource

_MAX_THREADS = 8
_BYTES_PER_TASK = 256 << 20
"""A file larger than it is read by several threads."""
_COMPARED_PLACES, _COMPARED_ROWS = 16, 64
"""Of two tensors: one that was trained differs everywhere, and reading all of both takes as long as loading them."""
_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class _Assignment:
    """One source with the parameter that it fills, once the parameter has memory."""

    source: WeightSource
    target: Tensor

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()


def load_weights(model: CausalLM, path: Path, device: torch.device) -> int:
    """Give `model` memory on `device` and fill it from the checkpoint folder `path`.

    Returns the bytes of this rank's parameters. Raises LoadError before any memory is taken where the checkpoint does
    not fit the model, and for files that cannot be read.
    """
    sources = _declared_sources(model)
    tensors = read_tensors(path)
    _check(model, [source for _, source in sources], tensors, path)
    _check_copies(model, [source for _, source in sources], tensors)
    materialize(model, device)
    with torch.no_grad():
        assignments = [
            _Assignment(source, getattr(module, source.parameter)[source.write]) for module, source in sources
        ]
        _zero_padding(model, assignments)
        _read(assignments, tensors)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_weights(model: CausalLM, path: Path) -> None:
    """Raise the LoadError that `load_weights` would raise for names, shapes and types. No weights are read."""
    _check(model, [source for _, source in _declared_sources(model)], read_tensors(path), path)


def init_random_weights(model: CausalLM, device: torch.device, seed: int = 0) -> int:
    """Random weights of a usual size instead of a checkpoint's, alike in every run; for benchmarks. Returns bytes."""
    materialize(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory on `device` for every parameter, uninitialised; shared parameters stay shared. Buffers are computed."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in made:
                    # Not empty_like: of a meta tensor it imports sympy, which may take seconds.
                    memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                setattr(module, name, made[id(parameter)])
        if isinstance(module, DerivedModule):
            module.derive(device)


def _declared_sources(model: CausalLM) -> list[tuple[WeightModule, WeightSource]]:
    return [
        (module, source)
        for module_path, module in model.named_modules()
        if isinstance(module, WeightModule)
        for source in module.weight_sources(module_path)
    ]


def _check(model: CausalLM, sources: Iterable[WeightSource], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    expected = {source.tensor: source.shape for source in sources}
    if missing := [name for name in expected if name not in tensors]:
        raise LoadError(f"{path}: {_some('missing from the checkpoint', missing)}{_tied_hint(missing)}")
    for name, shape in expected.items():
        found = tensors[name]
        if found.shape != shape:
            raise LoadError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, config.json asks for {list(shape)}"
            )
        if found.dtype not in _FLOAT_DTYPES:
            raise LoadError(
                f"{found.file}: tensor {name} is stored as {found.dtype}; supported: {', '.join(sorted(_FLOAT_DTYPES))}"
            )
    if extra := [name for name in tensors if name not in expected and not model.is_ignored(name)]:
        raise LoadError(f"{tensors[extra[0]].file}: {_some('unknown to the model that config.json describes', extra)}")


def _check_copies(model: CausalLM, sources: Iterable[WeightSource], tensors: Mapping[str, TensorInfo]) -> None:
    """Some tools write a tied LM head, too. With values of its own it is one that the model was trained with, and
    transformers computes with it: what config.json says is wrong then."""
    read = {source.tensor: source.read for source in sources}
    for name, info in tensors.items():
        original = model.original_of(name)
        if original is not None and not _are_equal(info, name, tensors[original], original, read[original]):
            raise LoadError(
                f"{info.file}: tensor {name} is not the same as {original}, though config.json says "
                f"`tie_word_embeddings: true`; write `false` there, or take {name} out of the file"
            )


def _are_equal(one: TensorInfo, name: str, other: TensorInfo, other_name: str, part: tuple[slice, ...]) -> bool:
    """Whether two tensors hold the same values, as far as some rows of `part` show."""
    if one.shape != other.shape:
        return False
    rows, columns = part
    try:
        with safe_open(one.file, framework="pt") as file, safe_open(other.file, framework="pt") as other_file:
            values, other_values = file.get_slice(name), other_file.get_slice(other_name)
            for start in range(rows.start, rows.stop, max(1, (rows.stop - rows.start) // _COMPARED_PLACES)):
                piece = slice(start, min(start + _COMPARED_ROWS, rows.stop)), columns
                found = values[piece]
                if not torch.equal(found, other_values[piece].to(found.dtype)):
                    return False
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{one.file} or {other.file}: cannot be read ({error}); download it again") from None
    return True


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {what}: {shown}"


def _tied_hint(missing: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return "; if it shares the embedding's weight, config.json must say `tie_word_embeddings: true`"
    return ""


def _zero_padding(model: nn.Module, assignments: Iterable[_Assignment]) -> None:
    covered: dict[int, int] = {}
    for a in assignments:
        key = a.target.untyped_storage().data_ptr()
        covered[key] = covered.get(key, 0) + a.target.numel()
    for parameter in model.parameters():
        if covered.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            parameter.zero_()


def _read(assignments: Iterable[_Assignment], tensors: Mapping[str, TensorInfo]) -> None:
    tasks: list[tuple[Path, list[_Assignment]]] = []
    by_file: dict[Path, list[_Assignment]] = {}
    for a in assignments:
        if a.target.numel() > 0:
            by_file.setdefault(tensors[a.source.tensor].file, []).append(a)
    for file, items in by_file.items():
        total = sum(a.num_bytes for a in items)
        parts = min(_MAX_THREADS, max(1, math.ceil(total / _BYTES_PER_TASK)), len(items))
        tasks += [(file, items[part::parts]) for part in range(parts)]
    if len(tasks) == 1:
        _read_task(*tasks[0])
        return
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, len(tasks)), thread_name_prefix="load") as pool:
        for future in [pool.submit(_read_task, *task) for task in tasks]:
            future.result()


def _read_task(file: Path, assignments: list[_Assignment]) -> None:
    try:
        # The mode is a thread's own, and parameters made in inference mode may be written in it alone.
        with torch.inference_mode(), safe_open(file, framework="pt", device="cpu") as handle:
            for a in assignments:
                a.target.copy_(handle.get_slice(a.source.tensor)[a.source.read])
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: cannot be read ({error}); download it again") from None
