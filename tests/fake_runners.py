"""Runners without a model, for tests of the engine and the executor. Named by import path in a rank's argument."""

from __future__ import annotations

import errno
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nvcli.config import EngineConfig
from nvcli.engine.protocol import EngineStart
from nvcli.errors import LoadError
from nvcli.executor import executor
from nvcli.executor.process import ChildProcess
from nvcli.messages import EngineReady, StepInput, StepOutput, pack, unpack
from nvcli.runner.interface import RankContext, Runner

BLOCK_SIZE = 4


def engine_config(**overrides: object) -> EngineConfig:
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
        self.is_output_rank = context.rank == config.output_rank
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
        return Output(StepOutput(step_id=step.step_id, token_ids=pack(tokens))) if self.is_output_rank else None


class HashingRunner(CountingRunner):
    """A model in little: each token depends on all before it, by what the blocks hold for them.

    A block that is read before it was written is an error; one that holds something else changes the answer.
    """

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.block_size = config.block_size
        self.kv: dict[tuple[int, int], int] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.lens: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def launch(self, step: StepInput) -> Output | None:
        self.apply(step)
        tokens = [self.compute(slot, [self.last[slot]]) for slot in unpack(step.decode_slots)]
        inputs = iter(unpack(step.token_ids))
        extends = zip(unpack(step.extend_slots), unpack(step.extend_lens), unpack(step.extend_samples), strict=True)
        for slot, length, samples in extends:
            token = self.compute(slot, [next(inputs) for _ in range(length)])
            if samples:
                tokens.append(token)
        return Output(StepOutput(step_id=step.step_id, token_ids=pack(tokens))) if self.is_output_rank else None

    def apply(self, step: StepInput) -> None:
        for slot in unpack(step.freed_slots):
            self.tables.pop(slot, None)
        for new in step.new_slots:
            assert new.slot not in self.tables, "the slot is taken"
            self.tables[new.slot] = {}
            self.lens[new.slot] = new.num_cached_tokens
        for slot, column, block in zip(*map(unpack, (step.block_slots, step.block_columns, step.block_ids))):  # noqa: B905
            self.tables[slot][column] = block

    def compute(self, slot: int, tokens: list[int]) -> int:
        """Store keys of these tokens, the next of a slot, and choose the one behind them."""
        for token in tokens:
            position = self.lens[slot]
            before = self.kv[self.place(slot, position - 1)] if position else 1
            self.kv[self.place(slot, position)] = (before * 31 + token + 7) % 1_000_003
            self.lens[slot] += 1
        self.last[slot] = 100 + self.kv[self.place(slot, self.lens[slot] - 1)] % 50
        return self.last[slot]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot][position // self.block_size], position % self.block_size


class OutOfMemoryRunner(HashingRunner):
    """Runs out of memory in the steps of NVCLI_TEST_STEPS, before it has stored anything; on the last rank only.

    The others wait for its part of the step.
    """

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.is_last = context.rank == config.num_ranks - 1
        self.bad_steps = range(*map(int, os.environ["NVCLI_TEST_STEPS"].split(",")))

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id in self.bad_steps:
            if not self.is_last:
                time.sleep(600)
            self.apply(step)
            raise MemoryError(f"none left for step {step.step_id}" + ", of which torch has a lot to say" * 8)
        return super().launch(step)


class StuckRestartRunner(OutOfMemoryRunner):
    """Never ready where it follows one that ran out of memory."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        if config.kv_blocks_before is not None:
            assert (config.kv_blocks_before, config.max_num_batched_tokens) == (64, 16)
            context.report_phase("load weights")
            Path(os.environ["NVCLI_TEST_FOLDER"], f"rank-{context.rank}-loads-again").touch()
            time.sleep(600)


def create_model_runner_out_of_memory(config: EngineConfig, context: RankContext) -> Runner:
    """The real one; on the last rank the second layer runs out of memory in the forward passes of NVCLI_TEST_STEPS."""
    import torch

    from nvcli.runner.model_runner import ModelRunner

    runner = ModelRunner(config, context)
    if context.rank < config.num_ranks - 1:
        return runner
    bad_passes = range(*map(int, os.environ["NVCLI_TEST_STEPS"].split(",")))
    layer = runner.model.model.layers["1"]  # type: ignore[union-attr,index]
    count = 0

    def fail(*args: object) -> None:
        nonlocal count
        count += 1
        if count in bad_passes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")

    layer.register_forward_pre_hook(fail)
    return runner


def create_model_runner_without_room(config: EngineConfig, context: RankContext) -> Runner:
    """The real one; another program takes the memory between its plan and its KV cache."""
    import torch

    from nvcli.runner import model_runner

    class LargeCache(model_runner.KVCache):
        def __init__(self, spec: object, num_blocks: int, *args: object) -> None:
            if num_blocks > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")
            super().__init__(spec, num_blocks, *args)  # type: ignore[arg-type]

    model_runner.KVCache = LargeCache  # type: ignore[misc]
    return model_runner.ModelRunner(config, context)


class SlowRunner(CountingRunner):
    """A step takes a while, so that there is time to kill things."""

    def launch(self, step: StepInput) -> Output | None:
        time.sleep(0.02)
        return super().launch(step)


class CrawlingRunner(CountingRunner):
    """A step takes a second."""

    def launch(self, step: StepInput) -> Output | None:
        time.sleep(1.0)
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


class UnloadableBesideStoreRunner(CountingRunner):
    """Rank 1 cannot be loaded; rank 0 says where the store listens all the same."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        if context.rank == 1:
            raise LoadError("model.safetensors: tensor lm_head.weight is missing")
        context.publish_port(1)
        Path(os.environ["NVCLI_TEST_FOLDER"], "published").touch()
        time.sleep(600)


class DiesLoadingRunner(CountingRunner):
    """Rank 1 dies while it loads; rank 0 would load for ever."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def engine_without_processes(start: EngineStart, control: Connection) -> None:
    """An engine's process that cannot start more others than NVCLI_TEST_PROCESSES."""
    from nvcli.engine.process import main

    left = int(os.environ["NVCLI_TEST_PROCESSES"])

    class Child(ChildProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*args, **kwargs)

    executor.ChildProcess = Child  # type: ignore[misc]
    main(start, control)


class SlowWarmUpRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("warm up")
        Path(os.environ["NVCLI_TEST_FOLDER"], f"rank-{context.rank}-warms-up").touch()
        time.sleep(600)


class SlowStartRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        time.sleep(600)
