"""Loading weights from a checkpoint folder into a model that was built on the meta device.

Layers declare what goes where (`weights.py`), and `checkpoint_check.py` knows which tensors must be present; this file
handles files and threads. Only this rank's slices are read, straight into the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nvcli.errors import LoadError
from nvcli.kernels.fp8_types import FP8, FP8_MAX
from nvcli.kernels.w4 import join_scales
from nvcli.kernels.weight_formats import FP8_BLOCK, W4Format
from nvcli.models.adapters.adapter import Adapter, with_own_head
from nvcli.models.causal_lm import CausalLM
from nvcli.models.checkpoint_check import TIED_HEAD, TIED_TO, check_tensors, read_model_tensors
from nvcli.models.kept_values import has_kept_codes, read_kept
from nvcli.models.kv_scales import find_kv_scales
from nvcli.models.stored_values import OpenFiles
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.weights import DerivedModule, ScaleTarget, WeightModule, WeightSource

_MAX_THREADS = 8
_STD, _FP8_STD = 0.02, 100.0
"""Standard deviations of random weights, and of random FP8 codes."""
_CODES_STD, _MIDDLE_CODE = 4.6, 8
"""Standard deviation and middle of random codes in 4 bits."""
_MXFP4_SCALES = 0x78787878
"""Four scales of 2^-7, with which random MXFP4 codes have about the standard deviation of random weights."""
_RANDOM_ROWS = 4096
"""Rows of random codes that are made at a time, in float32."""
_BYTES_PER_TASK = 256 << 20
"""Larger files are read by several threads."""
_PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Weights that are dequantised or quantised are read in pieces of about this many numbers: on a CPU, a float32 piece
fits in its cache; on a GPU, it takes little memory next to the weights."""
_COMPARED_PLACES, _COMPARED_ROWS = 16, 64
"""Two tensors are compared at this many places, of this many rows each: one that was trained separately differs
everywhere, and reading all of both takes as long as loading them."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One source with the parameter that it fills, once the parameter has memory."""

    source: WeightSource
    target: Tensor
    scales: Tensor | None
    """The parameter for scales, where `target` takes codes."""
    order: Tensor | None
    """The parameter for the order of the columns, if they have one."""

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()


def begin_loading(
    model: CausalLM,
    path: Path,
    device: torch.device,
    *,
    adapter: Adapter | None = None,
    has_own_head: bool = False,
    say: Callable[[str], object] = lambda note: None,
) -> Callable[[], None]:
    """Allocate `model` on `device`, start threads that fill it from the checkpoint folder `path`, and return a function
    that waits for them. Until then the model can be run on a GPU, but its results are meaningless. The changes of an
    `adapter` are merged into the weights as they are read. `has_own_head`: a head that the checkpoint ties to the
    embedding is a weight of its own, equal to it.

    Tells `say` what stays on disk. Raises LoadError, before any memory is allocated, if the checkpoint does not fit the
    model; the returned function raises it for files that cannot be read.
    """
    located = read_model_tensors(model.config, path)
    tensors = located.tensors if adapter is None else adapter.over(located.tensors)
    if has_own_head:
        tensors = with_own_head(tensors)
    check_tensors(model.config, tensors, path, stage=model.stage)
    for note in (located.note, None if adapter is None else adapter.note):
        if note is not None:
            say(note)
    _check_tied_head(model, tensors)
    materialize(model, device)
    with torch.no_grad():
        assignments = assignments_of(model)
        assert {a.source.tensor.name for a in assignments} == set(model.tensors), "every tensor has its layer"
        _zero_padding(model, assignments)
    pool, readings = _begin_to_read(assignments, tensors)

    def finish() -> None:
        try:
            for reading in readings:
                reading.result()
        finally:
            pool.shutdown(cancel_futures=True)
        for module in model.modules():
            if isinstance(module, WeightModule) and (problem := module.weight_problem()) is not None:
                raise LoadError(f"{path}: {problem}")

    return finish


def assignments_of(model: CausalLM) -> list[Assignment]:
    """Return what fills the parameters of a model that has memory."""
    modules = (module for module in model.modules() if isinstance(module, WeightModule))
    return [_assignment(module, source) for module in modules for source in module.weight_sources()]


def load_kv_scales(model: CausalLM, path: Path, device: torch.device) -> str | None:
    """Load the scales for an FP8 KV cache from the checkpoint folder `path` into the model's layers.

    Returns a note about them for the user; None if there are none. Raises LoadError for scales that are not positive
    numbers, for more than one per layer, and for files that cannot be read.
    """
    found = find_kv_scales(read_model_tensors(model.config, path).tensors)
    num_layers = num_scaled = 0
    for number, mixer in zip(model.stage.layers(model.config.num_layers), model.mixers, strict=True):
        if mixer.spec.is_state:
            continue
        num_layers += 1
        scales = found.get(number)
        reads_others = model.config.layers[number].mixer.reads_kv_of is not None
        if reads_others or scales is None or scales.k is None or scales.v is None:
            continue
        values = [_read_scale(info) for info in (scales.k, scales.v)]
        mixer.static_kv_scales = torch.tensor(values, dtype=torch.float32, device=device)
        num_scaled += 1
    if not num_scaled:
        return None
    return f"the FP8 KV cache takes the checkpoint's scales in {num_scaled:,} of {num_layers:,} layers"


def _read_scale(info: TensorInfo) -> float:
    try:
        with safe_open(info.file, framework="pt") as file:
            values = file.get_tensor(info.name)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{info.file}: cannot be read ({error}); download it again") from None
    way_out = "take it out of the file, or set kv_cache_dtype: auto"
    if values.numel() != 1:
        raise LoadError(
            f"{info.file}: tensor {info.name} has shape {list(values.shape)}, and the KV cache takes one scale for the "
            f"keys of a layer and one for its values; {way_out}"
        )
    scale = float(values)
    if not 0 < scale < math.inf:
        raise LoadError(f"{info.file}: tensor {info.name} is {scale}, and a scale has to be above 0; {way_out}")
    return scale


def _assignment(module: WeightModule, source: WeightSource) -> Assignment:
    scales, order = None, None
    if source.scales is not None:
        scales = getattr(module, source.scales.parameter)[source.scales.write]
        if source.scales.order_row is not None:
            order = module.get_parameter("column_order")[source.scales.order_row]
    return Assignment(source, getattr(module, source.parameter)[source.write], scales, order)


def init_random_weights(model: CausalLM, device: torch.device, seed: int = 0) -> int:
    """Fill the model with random weights of realistic magnitude, the same in every run, for benchmarks. Returns
    bytes."""
    materialize(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype in (torch.int16, torch.int32):
                _random_words(parameter, generator)
            elif parameter.dtype == FP8:
                flat = parameter.flatten(0, -2)
                for first in range(0, len(flat), _RANDOM_ROWS):
                    rows = flat[first : first + _RANDOM_ROWS]
                    values = torch.empty(rows.shape, device=device).normal_(0.0, _FP8_STD, generator=generator)
                    rows.copy_(values.clamp_(-FP8_MAX, FP8_MAX))  # larger values would be NaN
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _STD, generator=generator)
        for module in model.modules():
            if isinstance(module, WeightModule):
                for source in module.weight_sources():
                    if source.scales is not None:
                        _fill_scales(module, source.scales)
    return sum(model.weight_bytes().values())


def _random_words(parameter: Tensor, generator: torch.Generator) -> None:
    """Fill words with random codes. Scales and column orders are filled separately."""
    limits = torch.iinfo(parameter.dtype)
    parameter.random_(limits.min, limits.max + 1, generator=generator)


def _fill_scales(module: nn.Module, target: ScaleTarget) -> None:
    """Fill the scales of a parameter's codes so that its values have a realistic magnitude."""
    scales = getattr(module, target.parameter)
    if not isinstance(target.scaling, W4Format):
        scales.fill_(_STD / _FP8_STD)
    elif target.scaling.kind == "mxfp4":
        scales.fill_(_MXFP4_SCALES)
    else:
        one = torch.ones(1, 1)
        scales.fill_(int(join_scales(one * (_STD / _CODES_STD), one * _MIDDLE_CODE)))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter on `device`, and compute the buffers. Shared parameters stay shared. On a GPU the memory
    is zeroed, so that the model can be run before it has weights; on a CPU it is left uninitialised."""
    made: dict[int, nn.Parameter] = {}
    make = torch.zeros if device.type == "cuda" else torch.empty
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in made:
                    # Not empty_like: on a meta tensor it imports sympy, which may take seconds.
                    memory = make(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                setattr(module, name, made[id(parameter)])
        if isinstance(module, DerivedModule):
            module.derive(device)


def _check_tied_head(model: CausalLM, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise LoadError if the checkpoint's tied LM head has values of its own.

    The model was then trained with that head, and transformers computes with it: config.json is wrong.
    """
    if not (model.config.tie_word_embeddings and model.stage.is_last and TIED_HEAD in tensors):
        return
    head, embedding = tensors[TIED_HEAD], tensors[TIED_TO]
    mine = model.tensors[TIED_TO].shard(model.group.rank, model.group.size)
    if not _are_equal(head, embedding, mine):
        raise LoadError(
            f"{head.file}: tensor {head.name} is not the same as {embedding.name}, though config.json says "
            f"`tie_word_embeddings: true`; write `false` there, or take {head.name} out of the file"
        )


def _are_equal(one: TensorInfo, other: TensorInfo, part: tuple[slice, ...]) -> bool:
    """Whether two tensors hold the same values, judged by some rows of `part`."""
    if one.shape != other.shape:
        return False
    rows, columns = part
    try:
        with safe_open(one.file, framework="pt") as file, safe_open(other.file, framework="pt") as other_file:
            values, other_values = file.get_slice(one.name), other_file.get_slice(other.name)
            for start in range(rows.start, rows.stop, max(1, (rows.stop - rows.start) // _COMPARED_PLACES)):
                piece = slice(start, min(start + _COMPARED_ROWS, rows.stop)), columns
                found = values[piece]
                if not torch.equal(found, other_values[piece].to(found.dtype)):
                    return False
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{one.file} or {other.file}: cannot be read ({error}); download it again") from None
    return True


def _zero_padding(model: nn.Module, assignments: Iterable[Assignment]) -> None:
    covered: dict[int, int] = {}
    for a in assignments:
        key = a.target.untyped_storage().data_ptr()
        covered[key] = covered.get(key, 0) + a.target.numel()
    for parameter in model.parameters():
        if covered.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            parameter.zero_()


def read_weights(assignments: Iterable[Assignment], tensors: Mapping[str, TensorInfo]) -> None:
    """Read assignments on threads. Raises LoadError."""
    pool, readings = _begin_to_read(assignments, tensors)
    try:
        for reading in readings:
            reading.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_to_read(
    assignments: Iterable[Assignment], tensors: Mapping[str, TensorInfo]
) -> tuple[ThreadPoolExecutor, list[Future[None]]]:
    """Start threads that read files. Return the pool and its tasks."""
    tasks: list[tuple[Path, list[Assignment], Mapping[str, TensorInfo]]] = []
    by_file: dict[Path, list[Assignment]] = {}
    for a in assignments:
        if a.target.numel() > 0:
            by_file.setdefault(tensors[a.source.stored_name].file, []).append(a)
    for file, items in by_file.items():
        total = sum(a.num_bytes for a in items)
        parts = min(_MAX_THREADS, max(1, math.ceil(total / _BYTES_PER_TASK)), len(items))
        tasks += [(file, items[part::parts], tensors) for part in range(parts)]
    pool = ThreadPoolExecutor(max_workers=max(1, min(_MAX_THREADS, len(tasks))), thread_name_prefix="load")
    return pool, [pool.submit(_read_task, *task) for task in tasks]


def _read_task(file: Path, assignments: list[Assignment], tensors: Mapping[str, TensorInfo]) -> None:
    try:
        # Inference mode is per thread, and parameters made in it may only be written in it.
        with torch.inference_mode(), OpenFiles() as files:
            for whole in assignments:
                info = tensors[whole.source.stored_name]
                for a in _pieces(whole, info):
                    kept = read_kept(files, info, a.source, a.target.device)
                    for target, values in ((a.target, kept.weight), (a.scales, kept.scales), (a.order, kept.order)):
                        if target is not None and values is not None:
                            target.copy_(values)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: cannot be read ({error}); download it again") from None


def _pieces(a: Assignment, info: TensorInfo) -> Iterator[Assignment]:
    """Split an assignment into whole blocks of rows if its numbers have to be computed; otherwise it stays one
    piece."""
    is_computed = (a.target.dtype == FP8 or bool(info.changes)) and not info.is_transposed and a.target.dim() == 2
    is_words = a.scales is not None and a.target.dtype != FP8
    has_codes = info.codes is not None or info.flat is not None
    if is_words or not (is_computed or has_codes) or has_kept_codes(info, a.source):
        yield a
        return
    num_rows, num_columns = a.target.shape
    unit = math.lcm(FP8_BLOCK, len(a.source.tensor.row_order or (0,)))
    step = unit * max(1, _PIECE_NUMBERS[a.target.device.type] // (unit * num_columns))
    rows, columns = a.source.read
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        scales = a.scales
        if scales is not None:
            per_scale = FP8_BLOCK if scales.dim() == 2 else 1
            scales = scales[first // per_scale : -(-last // per_scale)]
        source = replace(a.source, read=(slice(rows.start + first, rows.start + last), columns))
        yield replace(a, source=source, target=a.target[first:last], scales=scales)
