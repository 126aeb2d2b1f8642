"""Limits of a rank's drafts: its memory, its attention backend and its stages."""

from __future__ import annotations

import msgspec
import torch

from nvcli.attention.backend import AttentionBackend
from nvcli.core.engine_config import EngineConfig
from nvcli.models.config import ModelConfig
from nvcli.sizing.memory import with_affordable_drafts
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def with_limited_drafts(
    config: EngineConfig, model: ModelConfig, weight_bytes: int, device: torch.device, world: TensorParallelGroup
) -> EngineConfig:
    """Limit the tokens of steps with drafts by the memory that the weights leave, alike on all ranks of `world`."""
    if not config.max_draft_tokens or device.type != "cuda":
        return config
    left = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization) - weight_bytes
    tokens = world.min(with_affordable_drafts(config, model, left).max_draft_step_tokens)
    return msgspec.structs.replace(config, draft_step_tokens=tokens)


def why_no_drafts(config: EngineConfig, backend: AttentionBackend, *, has_states: bool) -> str:
    """Return why steps cannot check drafts, or cannot make them; empty: they can. `has_states`: some layers have
    recurrent states."""
    if backend.needs_exact_lens:
        return f"the attention backend {backend.name} needs the exact length of each request"
    if config.draft_head is not None and not backend.plans_on_device:
        return f"the attention backend {backend.name} cannot run a head several times in a step; use triton"
    if config.pipeline_parallel_size > 1 and has_states:
        return "with pipeline stages (--pp) recurrent states do not learn in time which drafts are right"
    return ""
