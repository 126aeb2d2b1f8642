"""How the ranks of a run keep weights: what `quantization: auto` comes to for a checkpoint and the GPUs that are there.

What a checkpoint has in 4 bits is faster in 16 bits for large batches, as its products are. It stays in 4 bits where 16
would leave the KV cache little memory, with which batches would be small.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from nvcli.config import EngineConfig, RunConfig
from nvcli.config_types import KeptWeights
from nvcli.errors import ConfigError
from nvcli.models.config import ModelConfig
from nvcli.nvidia_smi import SmiReport, ask_for_gpus, visible_gpus
from nvcli.sizing.weights import largest_stage, weight_bytes

_LARGE_SHARE = 0.5
"""Weights that would take more of a GPU's memory than this share stay in 4 bits."""


def keep_weights(
    run: RunConfig,
    model: ModelConfig,
    device: Literal["cpu", "cuda"],
    *,
    gpu_bytes: int | None = None,
    report: SmiReport | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ModelConfig:
    """Return the model with its weights kept as a run's ranks do. Raises ConfigError.

    `gpu_bytes` is the memory of a GPU; None: that of the smallest one in `report`, which is what nvidia-smi says (None:
    ask it).
    """
    if run.quantization != "auto":
        return model.keeping(run.quantization)
    if device == "cpu" or run.batch_invariant or model.quantisation is None or model.quantisation.bits != 4:
        return model.keeping("none")
    tp = 1 if run.tensor_parallel_size == "auto" else run.tensor_parallel_size
    try:
        kept = model.keeping("w4a16")
    except ConfigError:  # as where its groups are too small
        return model.keeping("none")
    if not (kept.divides_by(tp) and model.divides_by(tp)):
        return model.keeping("none")
    if gpu_bytes is None:
        gpus = visible_gpus(ask_for_gpus() if report is None else report, environ)
        if isinstance(gpus, str) or not gpus:
            return model.keeping("none")
        gpu_bytes = min(gpu.total_bytes for gpu in gpus)
    dtype = model.dtype if run.dtype == "auto" else run.dtype
    stage = largest_stage(model, run.pipeline_parallel_size)
    plain_bytes = sum(weight_bytes(model, dtype, tensor_parallel_size=tp, stage=stage).values())
    choice: KeptWeights = "w4a16" if plain_bytes > _LARGE_SHARE * run.gpu_memory_utilization * gpu_bytes else "none"
    return model.keeping(choice)


def explain_choice(run: RunConfig, model: ModelConfig, config: EngineConfig) -> str:
    """Say in one line what `quantization: auto` chose for a checkpoint in 4 bits; empty where it had no choice."""
    if run.quantization != "auto" or config.device == "cpu" or run.batch_invariant or model.quantisation is None:
        return ""
    try:
        kept = model.keeping("w4a16")
    except ConfigError:
        return ""
    what = "experts" if kept.stored_groups.kind == "mxfp4" else "weights"
    if model.quantization == "w4a16":
        return (
            f"{what} stay in 4 bits, as {config.dtype} would take more than {_LARGE_SHARE:.0%} of a GPU's memory; "
            f"--quantization none: in {config.dtype}"
        )
    return f"{what} in 4 bits become {config.dtype}, as large batches are faster so; --quantization w4a16 keeps them"
