"""Runners without a model, for tests of the engine and the executor. Named by import path in a rank's argument."""

from __future__ import annotations

import os
import signal
import time

from nvcli.config import EngineConfig
from nvcli.errors import LoadError
from nvcli.messages import EngineReady, StepInput, StepOutput, pack, unpack
from nvcli.runner.interface import RankContext

BLOCK_SIZE = 4


def engine_config(**overrides: object) -> EngineConfig:
    from pathlib import Path

    values: dict[str, object] = {
        "model_path": Path("nowhere"),
        "device": "cpu",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory": None,
        "block_size": BLOCK_SIZE,
        "attention_backend": "auto",
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "step_timeout": 60.0,
    }
    return EngineConfig(**{**values, **overrides})  # type: ignore[arg-type]


class Output:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class CountingRunner:
    """Each slot generates 100, 101, 102, … from its prompt's end on: a lost, doubled or misplaced token shows."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        self.context = context
        self.counts: dict[int, int] = {}
        self.ready = EngineReady(
            num_blocks=64,
            block_size=config.block_size,
            kv_cache_bytes=0,
            weight_bytes=0,
            attention_backend="none",
            seconds={},
        )

    def peak_bytes(self) -> int:
        return 1000 + self.context.rank

    def launch(self, step: StepInput) -> Output | None:
        for new in step.new_slots:
            # A request that comes back after a preemption brings its output along as prompt.
            self.counts[new.slot] = new.num_cached_tokens - new.sampling.prompt_len
        tokens = []
        for slot in unpack(step.decode_slots):
            tokens.append(100 + self.counts[slot])
            self.counts[slot] += 1
        extends = zip(unpack(step.extend_slots), unpack(step.extend_lens), unpack(step.extend_samples), strict=True)
        for slot, length, samples in extends:
            self.counts[slot] += length
            if samples:
                tokens.append(100 + self.counts[slot])
                self.counts[slot] += 1
        return Output(StepOutput(step_id=step.step_id, token_ids=pack(tokens))) if self.context.rank == 0 else None


class SlowRunner(CountingRunner):
    """A step takes a while, so that there is time to kill things."""

    def launch(self, step: StepInput) -> Output | None:
        time.sleep(0.02)
        return super().launch(step)


class LaggingRunner(CountingRunner):
    """Rank 1 takes its time; nothing makes rank 0 wait for it."""

    def launch(self, step: StepInput) -> Output | None:
        if self.context.rank == 1:
            time.sleep(0.02)
        return super().launch(step)


class FailingRunner(CountingRunner):
    """Rank 1 (or the only rank) fails in step 5."""

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id == 5 and self.context.rank == int(os.environ.get("NVCLI_TEST_RANK", "0")):
            raise ZeroDivisionError("as planned")
        return super().launch(step)


class StuckRunner(CountingRunner):
    """Rank 0 never finishes step 3."""

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id == 3:
            time.sleep(600)
        return super().launch(step)


class UnloadableRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        raise LoadError("model.safetensors: tensor lm_head.weight is missing")


class DiesLoadingRunner(CountingRunner):
    """Rank 1 dies while it loads; rank 0 would load for ever."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class SlowStartRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        time.sleep(600)
