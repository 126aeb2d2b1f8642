"""What the host itself costs per step: scheduler, channel and output handling, with a runner that does nothing.

    python scripts/bench_host.py [--running 256 1024] [--steps 2000]

Everything is real but the model: a rank's process answers each step at once with token 0 for every request. Steps are
not overlapped here, so that each part is timed alone; `round trip` is a step's way through shared memory and both
processes, `collect` waits for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from nvcli.config import EngineConfig
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.protocol import OutputBatch
from nvcli.engine.request import Request
from nvcli.engine.scheduler import Scheduler
from nvcli.executor.executor import Executor
from nvcli.messages import EngineReady, StepInput, StepOutput, pack
from nvcli.runner.interface import RankContext
from nvcli.sampling_params import SamplingParams

BLOCK_SIZE = 64


class NullOutput:
    def __init__(self, step: StepInput) -> None:
        num_logits = step.num_decodes + sum(step.num_logits[4 * step.num_decodes :: 4])
        self._output = StepOutput(step_id=step.step_id, token_ids=bytes(4 * num_logits))

    def result(self) -> StepOutput:
        return self._output


class NullRunner:
    """Answers at once."""

    ready = EngineReady(
        num_blocks=1,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=0,
        kv_cache_tokens=BLOCK_SIZE,
        weight_bytes=0,
        attention_backend="none",
        seconds={},
    )

    def launch(self, step: StepInput) -> NullOutput:
        return NullOutput(step)


def create_null_runner(config: EngineConfig, context: RankContext) -> NullRunner:
    return NullRunner()


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds of each part of a decode step with `num_running` requests."""
    config = EngineConfig(
        model_path=Path(),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=1,
        max_model_len=8192,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9,
        kv_cache_memory=None,
        block_size=BLOCK_SIZE,
        attention_backend="auto",
        enable_prefix_caching=True,
        enforce_eager=False,
        step_timeout=60,
    )
    limits = scheduler_limits(config)
    scheduler = Scheduler(limits, BlockManager(num_running * (config.max_blocks_per_seq + 1)))
    executor = Executor(config, runner="bench_host:create_null_runner")
    executor.wait_ready()
    scheduler.add(
        Request(
            request_id=i,
            prompt_ids=pack(range(i, i + 16 + i % 64)),
            max_tokens=num_steps + num_running + 10,
            sampling=SamplingParams(),
            stop_ids=[1, 2],
            seed=0,
            row=i,
            sample=0,
        )
        for i in range(num_running)
    )
    encoder = msgspec.msgpack.Encoder()
    samples: dict[str, list[float]] = {}

    def timed(part: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        samples.setdefault(part, []).append(time.perf_counter() - start)
        return result

    try:
        while scheduler.stats.num_running < num_running:  # prompts
            step = scheduler.schedule()
            assert step is not None
            executor.submit(step.input)
            scheduler.process(step, executor.collect())
        samples.clear()
        for _ in range(num_steps):
            step = timed("schedule", scheduler.schedule)
            start = time.perf_counter()
            timed("submit", lambda step=step: executor.submit(step.input))
            output = timed("collect", executor.collect)
            samples.setdefault("round trip", []).append(time.perf_counter() - start)
            timed("process", lambda step=step, output=output: scheduler.process(step, output))
            timed("outputs", lambda: encoder.encode(OutputBatch(scheduler.take_outputs(), scheduler.stats)))
    finally:
        executor.close()
    return {part: statistics.median(values) * 1e3 for part, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for num_running in args.running:
        parts = measure(num_running, args.steps)
        total = sum(parts[part] for part in ("schedule", "round trip", "process", "outputs"))
        shown = ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items())
        print(f"{num_running} running: {total:.3f} ms a step ({shown})")


if __name__ == "__main__":
    main()
