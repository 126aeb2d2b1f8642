"""How the ranks of a run keep weights: what `quantization: auto` comes to for a checkpoint and the GPUs that are there.

A checkpoint in FP8 stays in FP8 on GPUs with units for FP8 products: they are faster, and take half the memory. GPUs
without such units, and CPUs, multiply plain numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from nvcli.config import EngineConfig, RunConfig
from nvcli.errors import ConfigError
from nvcli.kernels.weight_formats import FP8_CAPABILITY
from nvcli.models.config import ModelConfig
from nvcli.nvidia_smi import SmiGpu, SmiReport, ask_for_gpus, visible_gpus


def keep_weights(
    run: RunConfig,
    model: ModelConfig,
    device: Literal["cpu", "cuda"],
    *,
    gpus: Sequence[SmiGpu] | None = None,
    report: SmiReport | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ModelConfig:
    """Return the model with its weights kept as a run's ranks do. Raises ConfigError.

    `gpus` are those that the run is for; None: those in `report`, which is what nvidia-smi says (None: ask it).
    """
    if run.quantization != "auto":
        return model.keeping(run.quantization)
    if device == "cpu" or not _has_fp8(model) or _obstacle(run, model):
        return model.keeping("none")
    if gpus is None:
        found = visible_gpus(ask_for_gpus() if report is None else report, environ)
        gpus = () if isinstance(found, str) else found
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return model.keeping("fp8" if all(capability >= FP8_CAPABILITY for capability in known) else "none")


def explain_choice(run: RunConfig, model: ModelConfig, config: EngineConfig) -> str:
    """Say in one line what `quantization: auto` chose for a checkpoint in FP8; empty where it had no choice."""
    if run.quantization != "auto" or config.device == "cpu" or not _has_fp8(model):
        return ""
    if model.quantization == "fp8":
        return f"weights stay in FP8, as the checkpoint has them; --quantization none: in {config.dtype}"
    if obstacle := _obstacle(run, model):
        return f"FP8 weights become {config.dtype}, as {obstacle}"
    why = "the GPUs have no units for FP8 products; --quantization fp8 keeps them, in half the memory"
    return f"FP8 weights become {config.dtype}, as {why}"


def _has_fp8(model: ModelConfig) -> bool:
    return model.quantisation is not None and model.quantisation.numbers == "fp8"


def _obstacle(run: RunConfig, model: ModelConfig) -> str:
    """Say why a checkpoint's FP8 cannot be kept, whatever the GPUs are; empty where it can."""
    if run.batch_invariant:
        return "batch_invariant asks for it"
    try:
        kept = model.keeping("fp8")
    except ConfigError as error:  # layers that are left alone cannot be told
        return str(error)
    tp = 1 if run.tensor_parallel_size == "auto" else run.tensor_parallel_size
    if model.keeping("none").divides_by(tp) and not kept.divides_by(tp):
        return f"they cannot be cut over {tp} GPUs"
    return ""
