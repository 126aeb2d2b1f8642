"""Runs a workload through an engine, as `generate` does but without files and text, and keeps what it measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nvcli.bench.ceilings import measure_ceilings
from nvcli.bench.roofline import Ceilings, ModelCosts, Roofline
from nvcli.bench.workload import Workload
from nvcli.config import EngineConfig
from nvcli.engine.client import EngineClient
from nvcli.engine.request import StepRecord
from nvcli.errors import WorkerError
from nvcli.messages import EngineReady, ForwardMode, unpack
from nvcli.models.config import ModelConfig

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
    limits: dict[str, Roofline]
    """Likewise: against what the device could do at most."""
    roofline_share: float
    """The limit of all steps over `seconds`, the host's time and idle time included."""
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
    ceilings: Ceilings
    runs: list[Run]

    @property
    def median(self) -> Run:
        """The run of median speed (the slower of two)."""
        return sorted(self.runs, key=lambda run: run.output_rate)[(len(self.runs) - 1) // 2]


def bench(
    config: EngineConfig,
    workload: Workload,
    *,
    model: str,
    model_config: ModelConfig,
    repeat: int,
    say: Callable[[str], None],
) -> BenchResult:
    """Start an engine, let it answer a few tokens, then time `repeat` passes, and last what the device can do.

    Raises what the engine raises.
    """
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
        _pass(client, _WARM_UP, model_config.vocab_size, first_id=0)
        passes = []
        for number in range(repeat):
            first_id = _WARM_UP.num_requests + number * workload.num_requests
            passes.append(_pass(client, workload, model_config.vocab_size, first_id=first_id))
            say(f"run {number + 1} of {repeat}: {passes[-1].output_tokens / passes[-1].seconds:,.0f} output tokens/s")
    finally:
        client.close()
    ceilings = measure_ceilings(config.device, config.dtype)
    costs = ModelCosts.of(
        model_config,
        bytes_per_element=_DTYPE_BYTES[config.dtype],
        tensor_parallel_size=config.tensor_parallel_size,
    )
    return BenchResult(
        model=model,
        workload=workload,
        ready_seconds=ready_seconds,
        ready=ready,
        ceilings=ceilings,
        runs=[_run_of(one, costs, ceilings) for one in passes],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pass over the workload, as it was recorded."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    records: list[StepRecord]
    num_preemptions: int
    peak_kv_share: float


def _pass(client: EngineClient, workload: Workload, vocab_size: int, *, first_id: int) -> _Pass:
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
    return _Pass(
        seconds=time.perf_counter() - start,
        prompt_tokens=sum(len(request.prompt_ids) // 4 for request in requests),
        output_tokens=sum(request.max_tokens for request in requests),
        num_requests=len(requests),
        records=client.take_steps(),
        num_preemptions=client.stats.num_preemptions - preemptions_before,
        peak_kv_share=peak_blocks / max(1, client.stats.num_blocks),
    )


def _run_of(recorded: _Pass, costs: ModelCosts, ceilings: Ceilings) -> Run:
    by_mode = {mode.name: [r for r in recorded.records if r.mode == mode] for mode in ForwardMode}
    return Run(
        seconds=recorded.seconds,
        prompt_tokens=recorded.prompt_tokens,
        output_tokens=recorded.output_tokens,
        num_requests=recorded.num_requests,
        steps={mode: StepTimes.of(steps) for mode, steps in by_mode.items() if steps},
        limits={mode: Roofline.of(steps, costs, ceilings) for mode, steps in by_mode.items() if steps},
        roofline_share=Roofline.of(recorded.records, costs, ceilings).limit_seconds / recorded.seconds,
        num_preemptions=recorded.num_preemptions,
        peak_kv_share=recorded.peak_kv_share,
    )
