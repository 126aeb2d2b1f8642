"""How the ranks of a run keep weights: what `quantization: auto` comes to for a checkpoint and the GPUs that are there.

A checkpoint in FP8 stays in FP8 on GPUs with units for FP8 products: they are faster, and take half the memory. GPUs
without such units, and CPUs, multiply plain numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from nvcli.config import RunConfig
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
    is_in_fp8 = model.quantisation is not None and model.quantisation.numbers == "fp8"
    if device == "cpu" or not is_in_fp8 or run.batch_invariant:
        return model.keeping("none")
    tp = 1 if run.tensor_parallel_size == "auto" else run.tensor_parallel_size
    try:
        kept = model.keeping("fp8")
    except ConfigError:  # layers that are left alone cannot be told
        return model.keeping("none")
    if model.divides_by(tp) and not kept.divides_by(tp):  # as where blocks would be cut
        return model.keeping("none")
    if gpus is None:
        found = visible_gpus(ask_for_gpus() if report is None else report, environ)
        gpus = () if isinstance(found, str) else found
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return kept if all(capability >= FP8_CAPABILITY for capability in known) else model.keeping("none")
