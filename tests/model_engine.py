"""An engine without processes that computes with a model: the real scheduler and the real rank, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import write_tiny_model
from nvcli.core.engine_config import EngineConfig
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import RankExecutor
from scheduler_engine import SchedulerEngine
from weightless_model import write_weightless_model

NUM_BLOCKS = 200


class ModelEngine(SchedulerEngine):
    """`StartEngine` starts it by its class."""

    def __init__(self, config: EngineConfig) -> None:
        runner = ModelRunner(config, RankContext(rank=0, report_phase=lambda phase: None))
        num_blocks = min(NUM_BLOCKS, runner.ready.num_blocks)
        executor = RankExecutor(runner)
        super().__init__(config, num_blocks=num_blocks, executor=executor, kv_groups=runner.ready.kv_groups)


def write_byte_model(folder: Path, **settings: Any) -> Path:
    """A random tiny Qwen3 with the byte-level tokenizer of the weightless model, and 512 positions. `settings`: see
    `write_tiny_model`."""
    folder.mkdir()
    write_weightless_model(folder)
    return write_tiny_model(folder, vocab_size=258, **settings)
