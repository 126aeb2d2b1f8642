"""Loading weights from a checkpoint folder into a model that was built on the meta device.

Layers declare what goes where (`weights.py`), and `checkpoint_check.py` knows which tensors must be present; this file
handles files and threads. Only this rank's slices are read, straight into the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nvcli.attention.spec import AttentionSpec
from nvcli.errors import LoadError
from nvcli.kernels.fp8_types import FP8, FP8_MAX
from nvcli.kernels.w4 import join_halves, join_scales
from nvcli.kernels.weight_formats import AFFINE_KINDS, W4Format
from nvcli.kernels.whole_numbers import round_up
from nvcli.models.adapters.adapter import Adapter, with_own_head
from nvcli.models.causal_lm import CausalLM
from nvcli.models.checkpoint_check import TIED_HEAD, TIED_TO, check_tensors, find_unused, read_model_tensors
from nvcli.models.config import ModelConfig
from nvcli.models.kv_scales import find_kv_scales
from nvcli.models.stored_values import OpenFiles, reading
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.weight_reader import Assignment, begin_to_read
from nvcli.models.weights import DerivedModule, ScaleTarget, WeightModule, WeightSource

_ALIGNMENT = 512
"""Bytes to a multiple of which parameters are placed, as torch's allocator for GPUs does."""
_STD, _FP8_STD = 0.02, 100.0
"""Standard deviations of random weights, and of random FP8 codes."""
_CODES_STD, _MIDDLE_CODE = 4.6, 8
"""Standard deviation and middle of random codes in 4 bits."""
_MXFP4_SCALES = 0x78787878
"""Four scales of 2^-7, with which random MXFP4 codes have about the standard deviation of random weights."""
_MXFP4_POWERS, _MXFP4_FACTOR = 0x05050505, 2.0**-7
"""The same for activations in FP8."""
_NVFP4_SCALES, _FP4_STD = 0x38383838, 2.9
"""Four scales of 1, and the standard deviation of random codes of FP4."""
_RANDOM_ROWS = 4096
"""Rows of random codes that are made at a time, in float32."""
_COMPARED_PLACES, _COMPARED_ROWS = 16, 64
"""Two tensors are compared at this many places, of this many rows each: one that was trained separately differs
everywhere, and reading all of both takes as long as loading them."""


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The weights of a checkpoint folder, which were found to fit a model."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    """The tensors by the decoder's names."""
    unused: tuple[str, ...]
    """The names, as in the files, of tensors that are not among the weights."""
    notes: tuple[str, ...]
    """Lines for the user: what stays on disk, and what an adapter changes."""


def find_weights(
    model: CausalLM,
    path: Path,
    *,
    config: ModelConfig | None = None,
    adapter: Adapter | None = None,
    has_own_head: bool = False,
    reads_kv_scales: bool = False,
) -> CheckpointWeights:
    """Find a model's weights in a checkpoint folder; only headers are read, and a tied head is compared. The changes of
    an `adapter` are to be merged into them. `config` is what the folder's config.json says; None: the model's own.
    `has_own_head`: a head that the checkpoint ties to the embedding is a weight of its own, equal to it.
    `reads_kv_scales`: scales for an FP8 KV cache are among what is used.

    Raises LoadError if the checkpoint does not fit the model.
    """
    config = config or model.config
    located = read_model_tensors(config, path)
    tensors = located.tensors if adapter is None else adapter.over(located.tensors)
    if config.draft_head is not None:
        tensors = {**tensors, **config.draft_head.stored_tensors()}
    if has_own_head:
        tensors = with_own_head(tensors)
    check_tensors(config, tensors, path, stage=model.stage)
    _check_tied_head(model, tensors)
    notes = (located.note, None if adapter is None else adapter.note)
    unused = find_unused(config, located, reads_kv_scales=reads_kv_scales)
    return CheckpointWeights(path, tensors, unused, tuple(note for note in notes if note is not None))


def begin_reading(model: CausalLM, weights: CheckpointWeights) -> Callable[[], str | None]:
    """Start threads that fill a model's parameters, which have memory already, and return a function that waits for
    them. Until then the model can be run on a GPU, but its results are meaningless.

    The returned function returns a note for the user, if there is something to say about what was read, and raises
    LoadError for files that cannot be read.
    """
    names: set[str] = set()

    def noted() -> Iterator[Assignment]:
        for a in assignments_of(model):
            names.add(a.source.tensor.name)
            yield a

    with torch.no_grad():
        wait = begin_to_read(noted(), weights.tensors)
    assert names == set(model.tensors), "every tensor has its layer"

    def finish() -> str | None:
        rounded = wait()
        for module in model.modules():
            if isinstance(module, WeightModule) and (problem := module.weight_problem()) is not None:
                raise LoadError(f"{weights.path}: {problem}")
        return rounded.describe()

    return finish


def assignments_of(model: CausalLM) -> Iterator[Assignment]:
    """Yield what fills the parameters of a model that has memory."""
    for module in model.modules():
        if isinstance(module, WeightModule):
            for source in module.weight_sources():
                yield _assignment(module, source)


def read_kv_scales(model: CausalLM, weights: CheckpointWeights) -> dict[int, list[float]]:
    """Read a checkpoint's scales for an FP8 KV cache: those of keys and values, by the layer's index in the stage.
    Latents have scales of their own in any case.

    Raises LoadError for scales that are not positive numbers, for more than one per layer, and for files that cannot be
    read.
    """
    found = find_kv_scales(weights.tensors)
    scales: dict[int, list[float]] = {}
    for index, number in enumerate(model.config.decoder.stage_layers(model.stage)):
        of_layer = found.get(number, {})
        spec, reads_own = model.mixers[index].spec, model.config.layers[number].mixer.reads_kv_of is None
        if len(of_layer) == 2 and isinstance(spec, AttentionSpec) and spec.has_values and reads_own:
            scales[index] = [_read_scale(of_layer[kind]) for kind in "kv"]
    return scales


def set_kv_scales(model: CausalLM, scales: Mapping[int, list[float]], device: torch.device) -> str | None:
    """Give layers the scales that `read_kv_scales` returned; those that have some keep their tensors. Returns a note
    about them for the user; None if there are none."""
    for index, values in scales.items():
        mixer, tensor = model.mixers[index], torch.tensor(values, dtype=torch.float32, device=device)
        if mixer.static_kv_scales is None:
            mixer.static_kv_scales = tensor
        else:
            mixer.static_kv_scales.copy_(tensor)
    if not scales:
        return None
    num_layers = sum(not mixer.spec.is_state for mixer in model.mixers)
    return f"the FP8 KV cache takes the checkpoint's scales in {len(scales):,} of {num_layers:,} layers"


def _read_scale(info: TensorInfo) -> float:
    with reading(info.file), OpenFiles() as files:
        values = files.read_stored(info, [slice(None)] * len(info.shape))
    way_out = "take it out of the file, or set kv_cache_dtype: auto"
    if values.numel() != 1:
        raise info.error(
            f"has shape {list(values.shape)}, and the KV cache takes one scale for the keys of a layer and one for its "
            f"values; {way_out}"
        )
    scale = float(values)
    if not 0 < scale < math.inf:
        raise info.error(f"is {scale}, and a scale has to be above 0; {way_out}")
    return scale


def _assignment(module: WeightModule, source: WeightSource) -> Assignment:
    scales, order = None, None
    if source.scales is not None:
        scales = getattr(module, source.scales.parameter)[source.scales.write]
        if source.scales.order_row is not None:
            order = module.get_parameter("column_order")[source.scales.order_row]
    return Assignment(source, getattr(module, source.parameter)[source.write], scales, order)


def init_random_weights(model: CausalLM, device: torch.device) -> int:
    """Fill the model with random weights of realistic magnitude, the same in every run, for benchmarks. Returns
    bytes.

    Biases are 0: larger ones make rows alike, so that these use few experts.
    """
    materialize(model, device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.int16, torch.int32):
                limits = torch.iinfo(parameter.dtype)  # all codes; scales and column orders are filled separately
                parameter.random_(limits.min, limits.max + 1, generator=generator)
            elif parameter.dtype == FP8:
                flat = parameter.flatten(0, -2)
                for first in range(0, len(flat), _RANDOM_ROWS):
                    rows = flat[first : first + _RANDOM_ROWS]
                    values = torch.empty(rows.shape, device=device).normal_(0.0, _FP8_STD, generator=generator)
                    rows.copy_(values.clamp_(-FP8_MAX, FP8_MAX))  # larger values would be NaN
            elif parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, _STD, generator=generator)
        for module in model.modules():
            if isinstance(module, WeightModule):
                module.fill_tables()
                for source in module.weight_sources():
                    if source.scales is not None:
                        _fill_scales(module, source.scales)
    return sum(model.weight_bytes().values())


def _fill_scales(module: nn.Module, target: ScaleTarget) -> None:
    """Fill the scales of a parameter's codes so that its values have a realistic magnitude."""
    scales = getattr(module, target.parameter)
    if not isinstance(target.scaling, W4Format):
        scales.fill_(_STD / _FP8_STD)
    elif target.scaling.kind == "mxfp4":
        scales.fill_(_MXFP4_SCALES)
    elif target.scaling.kind == "mxfp4 for fp8":
        scales.fill_(_MXFP4_POWERS)
        scales[..., 0, :] = int(torch.tensor(_MXFP4_FACTOR).view(torch.int32))
    elif target.scaling.kind == "nvfp4":
        scales.fill_(_NVFP4_SCALES)
        scales[..., 0, :] = int(torch.tensor(_STD / _FP4_STD).view(torch.int32))
    else:
        one = torch.ones(1, 1)
        if target.scaling.kind in AFFINE_KINDS:
            scales.fill_(int(join_halves(one * (_STD / (_CODES_STD * target.scaling.zero / _MIDDLE_CODE)), one * 0)))
        else:
            scales.fill_(int(join_scales(one * (_STD / _CODES_STD), one * _MIDDLE_CODE)))


def materialize(model: nn.Module, device: torch.device, make: Callable[[int], Tensor] | None = None) -> None:
    """Allocate every parameter on `device`, all in one piece, and compute the buffers. Shared parameters stay shared.
    Does nothing if the parameters have memory.

    `make` returns zeros [number of bytes] uint8; None: torch's. Zeros are what a model can be run with before it has
    weights, and what stays where a parameter has more elements than its weight.
    """
    places: dict[int, int] = {}
    num_bytes = 0
    for parameter in model.parameters():
        if parameter.is_meta:
            places[id(parameter)] = num_bytes
            num_bytes += round_up(parameter.numel() * parameter.element_size(), _ALIGNMENT)
    if not places:
        return
    if make is None:
        make = partial(torch.zeros, dtype=torch.uint8, device=device)
    memory = make(num_bytes)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in made:
                    part = memory.narrow(0, places[id(parameter)], parameter.numel() * parameter.element_size())
                    values = part.view(parameter.dtype).view(parameter.shape)
                    made[id(parameter)] = nn.Parameter(values, requires_grad=False)
                setattr(module, name, made[id(parameter)])
        if isinstance(module, WeightModule):
            module.fill_tables()
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
        raise head.error(
            f"is not the same as {embedding.name}, though config.json says `tie_word_embeddings: true`; write `false` "
            f"there, or take {head.name} out of the file"
        )


def _are_equal(one: TensorInfo, other: TensorInfo, part: tuple[slice, ...]) -> bool:
    """Whether two tensors hold the same values, judged by some rows of `part`."""
    if one.shape != other.shape:
        return False
    rows, columns = part
    with reading(one.file, other.file), OpenFiles() as files:
        for start in range(rows.start, rows.stop, max(1, (rows.stop - rows.start) // _COMPARED_PLACES)):
            piece = slice(start, min(start + _COMPARED_ROWS, rows.stop)), columns
            found = files.read_stored(one, piece)
            if not torch.equal(found, files.read_stored(other, piece).to(found.dtype)):
                return False
    return True
