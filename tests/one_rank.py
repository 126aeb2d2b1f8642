"""A rank and its scheduler in this process, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_runners import engine_config
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import KVGroup
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.runner.interface import RankContext
from nvcli.runner.model_runner import ModelRunner


def make_runner(path: Path, device: str = "cuda", **overrides: Any) -> ModelRunner:
    values: dict[str, Any] = {
        "model_path": path,
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 64,
        "gpu_memory_utilization": 0.2,
    }
    context = RankContext(
        rank=0, report_phase=lambda phase: None, publish_port=lambda port: None, wait_for_port=lambda: 0
    )
    return ModelRunner(engine_config(**{**values, **overrides}), context)


def make_scheduler(runner: ModelRunner) -> Scheduler:
    config = runner.config
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_groups=tuple(KVGroup(window) for window in runner.ready.group_windows),
    )
    return Scheduler(limits, BlockManager(runner.ready.num_blocks))
