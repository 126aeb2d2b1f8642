"""The memory of LoRA adapters that rows choose from: on each device and in host memory. Torch-free.

An adapter takes as many pages as its rank needs, each of which holds `PAGE_RANKS` ranks of every layer that any adapter
changes (`kernels/lora_types.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import BASE_SHARE, PAGE_RANKS
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.adapters.row_adapters import linear_tensors
from nvcli.models.config import ModelConfig
from nvcli.models.tensor_spec import DTYPE_BYTES, FUSED
from nvcli.sizing.weights import largest_stage
from nvcli.worker.distributed.stage import Stage

_SHARE = 0.15
"""Share of a GPU's free memory after weights that adapters take unless lora.max_loaded is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemory:
    """The memory of a rank's parts of the adapters."""

    num_places: int
    """Adapters on the device at a time."""
    device_bytes: int
    """The memory that they take, with the base of weights into which others are merged in turn."""
    host_bytes: int
    """Host memory once every adapter was used."""


def choose_places(config: EngineConfig, num_bytes: Callable[[int], int], free: int | None) -> int:
    """Return how many adapters are on the device at a time: at most `max_loaded_adapters`, or by default as many as
    requests can use at once and as fit into a small share of `free` bytes after weights (None: no limit).

    `num_bytes` returns the size of that many adapters.
    """
    most = min(len(config.placed_adapters), config.max_num_seqs)
    if config.max_loaded_adapters is not None:
        return min(most, config.max_loaded_adapters)
    if free is None:
        return most
    return next((fewer for fewer in range(most, 1, -1) if num_bytes(fewer) <= free * _SHARE), 1)


def adapter_memory(
    config: EngineConfig, model: ModelConfig, free: int | None, stage: Stage | None = None
) -> AdapterMemory:
    """Plan the adapters' memory of a rank of `stage` (None: that with the most layers), with `free` bytes of the device
    after weights (None: no limit)."""
    stage = stage or largest_stage(model, config.pipeline_parallel_size)
    base = _base_bytes(config, model, stage, free)
    if not config.placed_adapters:
        return AdapterMemory(num_places=0, device_bytes=base, host_bytes=0)
    one = _page_bytes(config, model, stage)
    ranks = [config.lora_sizes.ranks[number - 1] for number in config.placed_adapters]
    pages = sorted((ceil_div(rank, PAGE_RANKS) for rank in ranks), reverse=True)

    def num_bytes(num_places: int) -> int:
        return sum(pages[:num_places]) * one

    num_places = choose_places(config, num_bytes, free)
    return AdapterMemory(num_places=num_places, device_bytes=num_bytes(num_places) + base, host_bytes=sum(pages) * one)


def _base_bytes(config: EngineConfig, model: ModelConfig, stage: Stage, free: int | None) -> int:
    """Estimate the base of the weights into which adapters are merged in turn; 0 where it is not kept on the device."""
    is_fp8 = config.quantization == "fp8" and model.quantisation is None  # kept as the checkpoint has it
    if not config.merged_adapters or not (config.quantization == "none" or is_fp8) or free is None:
        return 0
    changed = set(config.lora_sizes.projections)
    num_bytes = sum(
        2 * math.prod(tensor.kept_shape(config.tensor_parallel_size))
        if is_fp8
        else tensor.kept_bytes(config.tensor_parallel_size)
        for tensor in linear_tensors(model, stage)
        if not changed or tensor.name.split(".")[-2] in changed
    )
    return num_bytes if num_bytes <= free * BASE_SHARE else 0


def _page_bytes(config: EngineConfig, model: ModelConfig, stage: Stage) -> int:
    """Return the size of a page. Projections that a layer fuses are there if one of them is changed."""
    changed = set(config.lora_sizes.projections)
    for parts in FUSED.values():
        if not changed.isdisjoint(parts):
            changed.update(parts)
    features = sum(
        sum(tensor.kept_shape(config.tensor_parallel_size))
        for tensor in linear_tensors(model, stage)
        if tensor.name.split(".")[-2] in changed
    )
    return PAGE_RANKS * features * DTYPE_BYTES[config.dtype]
