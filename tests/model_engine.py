"""An engine without processes that computes with a model: the real scheduler and the real rank, in this process."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from checkpoints import write_tiny_model
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput, StepOutput
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from scheduler_engine import SchedulerEngine
from weightless_model import write_weightless_model

NUM_BLOCKS = 200


class ModelExecutor:
    """Runs steps at once on one rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._runner = ModelRunner(config, RankContext(rank=0, report_phase=lambda phase: None))
        self._outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        pending = self._runner.launch(step)
        assert pending is not None
        self._outputs.append(pending.result())

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        raise AssertionError("no step runs out of memory")


class ModelEngine(SchedulerEngine):
    """`StartEngine` starts it by its class."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, num_blocks=NUM_BLOCKS, executor=ModelExecutor(config))


def write_byte_model(folder: Path) -> Path:
    """A random tiny Qwen3 with the byte-level tokenizer of the weightless model, and 512 positions."""
    folder.mkdir()
    write_weightless_model(folder)
    return write_tiny_model(folder, vocab_size=258)
