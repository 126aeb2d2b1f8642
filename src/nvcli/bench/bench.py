"""Runs a workload through an engine, as `generate` does but without files and text, and keeps what it measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nvcli.bench.workload import Workload
from nvcli.config import EngineConfig
from nvcli.engine.client import EngineClient
from nvcli.engine.request import StepRecord
from nvcli.errors import WorkerError
from nvcli.messages import EngineReady, ForwardMode, unpack

_WARM_UP = Workload(num_requests=2, input_len=(8, 8), output_len=(4, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps of one kind. Times in milliseconds."""

    count: int
    total: float
    median: float
    p90: float
    p99: float
    idle_median: float
    """The device's idle time before a step."""
    idle_p99: float

    @staticmethod
    def of(records: Sequence[StepRecord]) -> StepTimes:
        seconds = sorted(r.seconds for r in records)
        idle = sorted(r.idle_seconds for r in records)

        def at(values: list[float], share: float) -> float:
            return values[min(len(values) - 1, int(share * len(values)))] * 1e3

        return StepTimes(
            count=len(records),
            total=sum(seconds) * 1e3,
            median=at(seconds, 0.5),
            p90=at(seconds, 0.9),
            p99=at(seconds, 0.99),
            idle_median=at(idle, 0.5),
            idle_p99=at(idle, 0.99),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over the workload."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    steps: dict[str, StepTimes]
    """By forward mode."""
    num_preemptions: int
    peak_kv_share: float

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What `nvcli bench` reports."""

    model: str
    workload: Workload
    ready_seconds: float
    """From the command's call of the engine to its report."""
    ready: EngineReady
    runs: list[Run] = field(default_factory=list)

    @property
    def median(self) -> Run:
        """The run of median speed (the slower of two)."""
        return sorted(self.runs, key=lambda run: run.output_rate)[(len(self.runs) - 1) // 2]


def bench(
    config: EngineConfig,
    workload: Workload,
    *,
    model: str,
    vocab_size: int,
    repeat: int,
    say: Callable[[str], None],
) -> BenchResult:
    """Start an engine, let it answer a few tokens, then time `repeat` passes. Raises what the engine raises."""
    start = time.perf_counter()
    client = EngineClient.start(config)
    try:
        ready = None
        while ready is None:
            ready = client.wait_ready(1.0)
        ready_seconds = time.perf_counter() - start
        say(f"ready in {ready_seconds:.1f} s; KV cache for {ready.num_blocks * ready.block_size:,} tokens")
        for note in ready.notes:
            say(note)
        result = BenchResult(model=model, workload=workload, ready_seconds=ready_seconds, ready=ready, runs=[])
        _run(client, _WARM_UP, vocab_size, first_id=0)
        for number in range(repeat):
            first_id = _WARM_UP.num_requests + number * workload.num_requests
            result.runs.append(_run(client, workload, vocab_size, first_id=first_id))
            say(f"run {number + 1} of {repeat}: {result.runs[-1].output_rate:,.0f} output tokens/s")
        return result
    finally:
        client.close()


def _run(client: EngineClient, workload: Workload, vocab_size: int, *, first_id: int) -> Run:
    requests = workload.requests(vocab_size, first_id=first_id)
    wanted = {request.request_id: request.max_tokens for request in requests}
    preemptions_before = client.stats.num_preemptions
    client.take_steps()
    peak_blocks = 0
    start = time.perf_counter()
    client.add(requests)
    while wanted:
        for output in client.poll(1.0):
            if output.finish_reason == "error":
                raise WorkerError(f"request {output.request_id} failed: {output.error}")
            num_tokens = len(unpack(output.token_ids))
            expected = wanted.pop(output.request_id)
            assert num_tokens == expected, f"{num_tokens} tokens where {expected} were asked for"
        peak_blocks = max(peak_blocks, client.stats.num_used_blocks)
    seconds = time.perf_counter() - start
    records = client.take_steps()
    by_mode = {mode.name: [r for r in records if r.mode == mode] for mode in ForwardMode}
    return Run(
        seconds=seconds,
        prompt_tokens=sum(len(request.prompt_ids) // 4 for request in requests),
        output_tokens=sum(request.max_tokens for request in requests),
        num_requests=len(requests),
        steps={mode: StepTimes.of(steps) for mode, steps in by_mode.items() if steps},
        num_preemptions=client.stats.num_preemptions - preemptions_before,
        peak_kv_share=peak_blocks / max(1, client.stats.num_blocks),
    )
