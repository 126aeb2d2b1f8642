"""The configuration of an engine that runs no model of its own: for simulations, benchmarks of the host, and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvcli.core.engine_config import EngineConfig


def plain_config(**settings: Any) -> EngineConfig:
    """Return the configuration of one rank on the CPU that has these settings, and otherwise the usual ones."""
    usual: dict[str, Any] = {
        "model_path": Path("nowhere"),
        "device": "cpu",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory": None,
        "block_size": 64,
        "attention_backend": "auto",
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "step_timeout": 60.0,
    }
    return EngineConfig(**usual | settings)
