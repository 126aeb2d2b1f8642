"""Tells roughly whether a model's weights fit; `nvcli profile-memory` knows it exactly."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.config import DTYPE_BYTES, EngineConfig
from nvcli.doctor.device_probe import GpuReport
from nvcli.doctor.findings import Finding, format_gib, ok, problem, warning
from nvcli.models.config import ModelConfig
from nvcli.sizing.memory import largest_stage
from nvcli.sizing.weights import weight_elements

_LITTLE_BYTES = 2 << 30
"""Activations and CUDA graphs of usual runs take about this much; the rest holds KV cache."""


def check_fit(
    config: EngineConfig,
    model: ModelConfig,
    num_weights: int,
    *,
    num_replicas: int,
    gpus: Sequence[GpuReport],
    ram: int,
) -> Finding:
    """Check one model. `num_replicas` is the data-parallel size; `ram` is the free bytes, for runs on a CPU."""
    size = config.tensor_parallel_size
    weights = num_weights * DTYPE_BYTES[config.dtype]
    if config.device == "cpu":
        return _fit_ram(weights * num_replicas, ram, config)
    if config.pipeline_parallel_size > 1:
        of_stage = sum(weight_elements(model, stage=largest_stage(config, model)).values())
        weights = weights * of_stage // sum(weight_elements(model).values())
    weights //= size
    needed = gpus[: config.num_ranks * num_replicas]
    if not needed:
        return warning("memory", f"{format_gib(weights)} of weights a GPU, and no GPU to hold them", "see above")
    rooms = [
        int(gpu.total_bytes * config.gpu_memory_utilization) - (gpu.total_bytes - gpu.free_bytes) for gpu in needed
    ]
    left = min(rooms) - weights
    found = f"{format_gib(weights)} of weights ({config.dtype}) on each GPU"
    if left > _LITTLE_BYTES:
        return ok("memory", f"{found}; leaves about {format_gib(left)} for KV cache and working memory")
    larger = _next_size(model, size)
    advice = "raise gpu_memory_utilization, free the GPUs" + (f", or use --tp {larger}" if larger else "")
    if left > 0:
        return warning("memory", f"{found}; leaves only about {format_gib(left)}", advice)
    return problem("memory", f"{found}; {format_gib(-left)} more than gpu_memory_utilization allows", advice)


def _fit_ram(weights: int, ram: int, config: EngineConfig) -> Finding:
    found = f"{format_gib(weights)} of weights ({config.dtype}) in {format_gib(ram)} of free RAM"
    if weights >= ram:
        return problem("memory", found, "use a smaller model, --set dtype=bfloat16, or a GPU")
    return ok("memory", found)


def _next_size(model: ModelConfig, size: int) -> int | None:
    """Return the next larger tensor-parallel size that the model can be cut into; None where there is none."""
    return next((n for n in range(size + 1, 17) if model.divides_by(n)), None)
