"""The weights that one rank loads from a checkpoint, without the other ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from model_driver import CPU, load_weights
from nvcli.core.config_types import KeptWeights
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import load_model_config
from nvcli.models.registry import build_model
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.worker.distributed.stage import WHOLE, Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def load_model(
    path: Path,
    rank: int = 0,
    size: int = 1,
    stage: Stage = WHOLE,
    device: torch.device = CPU,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: KeptWeights = "none",
    expert_parallel: bool = False,
    lora: Path | None = None,
) -> CausalLM:
    """The model of rank `rank` of `size` ranks in a stage."""
    group = TensorParallelGroup.single()
    group.rank, group.size = rank, size
    config = with_stored_tensors(load_model_config(path, expert_parallel=expert_parallel), path)
    adapter = None if lora is None else read_adapter(lora, config)
    config = (config if adapter is None else adapter.adapt(config)).with_quantization(quantization)
    model = build_model(config, group, dtype, stage=stage)
    load_weights(model, path, device, adapter=adapter)
    return model


def load_parameters(
    path: Path, rank: int = 0, size: int = 1, stage: Stage = WHOLE, *, expert_parallel: bool = False
) -> dict[str, Tensor]:
    """The parameters of that model, in float32, by their names."""
    return dict(load_model(path, rank, size, stage, expert_parallel=expert_parallel).named_parameters())
