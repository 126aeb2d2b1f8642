"""Estimates whether a model's weights fit; `nvcli profile-memory` gives the exact answer."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.core.engine_config import EngineConfig
from nvcli.models.config import ModelConfig
from nvcli.sizing.ram import ram_of_weights, ways_to_less_ram
from nvcli.sizing.weights import rank_weights
from nvcli.tools.doctor.device_probe import GpuReport
from nvcli.tools.doctor.findings import Finding, format_gib, ok, problem, warning

_LITTLE_BYTES = 2 << 30
"""Activations and CUDA graphs usually take about this much; the rest is for the KV cache."""


def check_fit(
    config: EngineConfig, model: ModelConfig, *, num_replicas: int, gpus: Sequence[GpuReport], ram: int
) -> Finding:
    """Check the weights of one rank against its memory.

    `num_replicas` is the data-parallel size, and `ram` is the free RAM in bytes, used on a CPU only.
    """
    size = config.tensor_parallel_size
    if config.device == "cpu":
        return _fit_ram(config, model, num_replicas=num_replicas, ram=ram)
    weights = sum(rank_weights(config, model).values())
    needed = gpus[: config.num_ranks * num_replicas]
    if not needed:
        return warning("memory", f"{format_gib(weights)} of weights per GPU, but no GPU to hold them", "see above")
    rooms = [
        int(gpu.total_bytes * config.gpu_memory_utilization) - (gpu.total_bytes - gpu.free_bytes) for gpu in needed
    ]
    left = min(rooms) - weights
    found = f"{format_gib(weights)} of weights ({config.weights_type}) on each GPU"
    if left > _LITTLE_BYTES:
        return ok("memory", f"{found}; leaves about {format_gib(left)} for KV cache and working memory")
    larger = _next_size(model, size)
    advice = "raise gpu_memory_utilization, free the GPUs" + (f", or use --tp {larger}" if larger else "")
    if left > 0:
        return warning("memory", f"{found}; leaves only about {format_gib(left)}", advice)
    return problem("memory", f"{found}; {format_gib(-left)} more than gpu_memory_utilization allows", advice)


def _fit_ram(config: EngineConfig, model: ModelConfig, *, num_replicas: int, ram: int) -> Finding:
    weights = ram_of_weights(config, model, num_replicas=num_replicas)
    found = f"{format_gib(weights)} of weights ({config.weights_type}) in {format_gib(ram)} of free RAM"
    if weights >= ram:
        return problem("memory", found, ways_to_less_ram(config, num_replicas=num_replicas))
    return ok("memory", found)


def _next_size(model: ModelConfig, size: int) -> int | None:
    """Return the next larger tensor-parallel size that divides the model; None if there is none."""
    return next((n for n in range(size + 1, 17) if model.divides_by(n)), None)
