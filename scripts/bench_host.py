"""Measures what the host costs per step: scheduler, channel and output handling, with a runner that does nothing.

    python scripts/bench_host.py [--running 256 1024] [--steps 2000]
    python scripts/bench_host.py --start 0 2048 [--requests 1024]    # how a job starts

Everything is real but the model: a rank's process answers each step at once with token 0 for every request. Steps are
not overlapped here, so that each part is timed alone; `round trip` is a step's way through shared memory and both
processes, `collect` waits for it.

With `--start` an engine in its own process is timed, from the sending of many requests that share so many tokens, and
have 64 of their own, until the rank gets the first step, and until it gets the step that admits the last requests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from benchmark import Case, Figures, run_benchmark
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, StepInput, StepOutput, pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.client import EngineClient
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.protocol import OutputBatch
from nvcli.engine.request import Request
from nvcli.engine.scheduler import Scheduler
from nvcli.tools.bench.workload import PrefixLevel, Workload
from nvcli.worker.executor.executor import Executor
from nvcli.worker.runner.interface import RankContext
from plain_config import plain_config

BLOCK_SIZE = 64


class NullOutput:
    def __init__(self, step: StepInput) -> None:
        num_logits = sum(unpack(step.num_logits))
        # In the place of the time that a step takes stands when the rank got it.
        self._output = StepOutput(step_id=step.step_id, token_ids=bytes(4 * num_logits), seconds=time.monotonic())

    def result(self) -> StepOutput:
        return self._output


class NullRunner:
    """Answers at once."""

    ready = EngineReady(
        num_blocks=20_000,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=0,
        kv_cache_tokens=BLOCK_SIZE,
        weight_bytes=0,
        attention_backend="none",
        seconds={},
    )

    def launch(self, step: StepInput) -> NullOutput:
        return NullOutput(step)

    def peak_bytes(self) -> int:
        return 0


def create_null_runner(config: EngineConfig, context: RankContext) -> NullRunner:
    return NullRunner()


def measure(num_running: int, num_steps: int, number: int) -> Figures:
    """Return the median milliseconds of a decode step with `num_running` requests, and of each of its parts."""
    config = plain_config(max_num_seqs=num_running)
    limits = scheduler_limits(config, NullRunner.ready)
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
    parts = {part: statistics.median(values) * 1e3 for part, values in samples.items()}
    step = sum(parts[part] for part in ("schedule", "round trip", "process", "outputs"))
    return {"a step, ms": step, **parts}


def measure_start(num_requests: int, num_shared: int, number: int, *, num_passes: int = 9) -> Figures:
    """Return the median milliseconds until the rank gets the first step, and the step that admits the last request."""
    config = plain_config(max_num_seqs=num_requests, max_num_batched_tokens=16_384, record_steps=True)
    client = EngineClient.start(config, runner="bench_host:create_null_runner")
    workload = Workload(
        num_requests=num_requests,
        input_len=(64, 64),
        output_len=(8, 8),
        shared_prefix=(PrefixLevel(num_tokens=num_shared),) if num_shared else (),
    )
    requests = workload.requests(10_000)
    samples = []
    try:
        client.wait_ready()
        for number in range(num_passes):
            first_id = number * num_requests
            numbered = [msgspec.structs.replace(each, request_id=first_id + each.request_id) for each in requests]
            client.forget_prefixes()
            client.take_steps()
            start = time.monotonic()
            client.add(numbered)
            num_answers = 0
            while num_answers < num_requests:
                num_answers += len(client.poll(60))
            got_at = [step.seconds - start for step in client.take_steps() if step.num_chunks]
            samples.append((got_at[0], got_at[-1]))
    finally:
        client.close()
    first, last = (statistics.median(times) * 1e3 for times in zip(*samples, strict=True))
    return {"first step, ms": first, "last admitted, ms": last}


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    for num_shared in options.start or ():
        name = f"{options.requests} requests, {num_shared} tokens shared"
        yield Case(name, partial(measure_start, options.requests, num_shared))
    for num_running in () if options.start else options.running:
        yield Case(f"{num_running} running", partial(measure, num_running, options.steps))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--start", type=int, nargs="+", metavar="SHARED", help="time the start of a job instead")
    parser.add_argument("--requests", type=int, default=1024, help="requests that the job of --start sends")


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options)
