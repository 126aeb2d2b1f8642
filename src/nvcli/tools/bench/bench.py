"""Runs requests through engines like `generate`, but without files and text, and returns the measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median_low

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.engine.request import Request, StepRecord
from nvcli.errors import CapacityError, ConfigError
from nvcli.models.config import ModelConfig
from nvcli.sizing.costs import model_costs
from nvcli.tools.bench.ablation import Ablation, AblationResult
from nvcli.tools.bench.ceilings import measure_ceilings
from nvcli.tools.bench.engines import Engines, Pass
from nvcli.tools.bench.file_workload import FileWorkload
from nvcli.tools.bench.made_up_images import BenchImages
from nvcli.tools.bench.measures import Run, run_of
from nvcli.tools.bench.roofline import Ceilings
from nvcli.tools.bench.workload import Workload
from nvcli.worker.distributed.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLayout:
    """The device and the layout of a benchmark."""

    device: str
    """The name of the GPU, or CPU."""
    gpus: list[int]
    """GPU index of each rank, replica by replica, as this process numbers GPUs; empty on a CPU."""
    dtype: str
    kv_cache_dtype: str
    """Data type of keys and values: `EngineConfig.kv_dtype`."""
    tensor_parallel_size: int
    enable_expert_parallel: bool
    enable_attention_dp: bool
    pipeline_parallel_size: int
    data_parallel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAdapters:
    """The LoRA adapters over which the requests are spread."""

    num_adapters: int
    made_up_rank: int | None
    """The rank of adapters that were made up for the benchmark; None: they were given."""
    num_merged: int
    """Adapters that are merged into the weights in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The result of `nvcli bench`."""

    model: str
    date: str
    """Start of the measurement, in UTC (ISO 8601)."""
    layout: BenchLayout
    workload: Workload | FileWorkload
    adapters: BenchAdapters | None
    """None: no request has an adapter of its own. `ready.max_loaded_adapters` are on each device at a time."""
    images: BenchImages | None
    """None: prompts have no images."""
    data_parallel_size: int
    ready_seconds: float
    """Seconds from the start of the replicas until the last one is ready."""
    ready: EngineReady
    """The first replica's report."""
    peak_bytes: list[list[int]]
    """Peak memory of each rank in bytes: [replica][rank]."""
    ceilings: Ceilings
    runs: list[Run]
    timelines: list[list[StepRecord]]
    """The steps of the first replica in each run."""
    ablations: list[AblationResult]

    @property
    def median(self) -> Run:
        """The run of median speed (of two, the slower)."""
        return self.runs[self.median_number]

    @property
    def image_rate(self) -> float | None:
        """Images of prompts per second in the median run; None: they have none."""
        if self.images is None:
            return None
        samples = self.workload.samples if isinstance(self.workload, Workload) else 1
        return self.images.per_prompt * self.median.request_rate / samples

    @property
    def median_number(self) -> int:
        rates = [run.output_rate for run in self.runs]
        return rates.index(median_low(rates))

    @property
    def ready_parts(self) -> dict[str, float]:
        """Seconds of each part of the start-up.

        Time that rank 0 of the first replica does not account for is the start of the engine process itself.
        """
        return {"engine process": max(0.0, self.ready_seconds - sum(self.ready.seconds.values())), **self.ready.seconds}


def bench(
    config: EngineConfig,
    requests: Sequence[Request],
    *,
    model: str,
    model_config: ModelConfig,
    workload: Workload | FileWorkload,
    adapters: BenchAdapters | None,
    images: BenchImages | None,
    data_parallel_size: int,
    repeat: int,
    ablations: Sequence[Ablation],
    say: Callable[[str], None],
) -> BenchResult:
    """Time `repeat` passes over `requests`, then measure the device's limits, and run the ablations last.

    Raises what the engines raise.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    measured = _measure(config, requests, data_parallel_size=data_parallel_size, repeat=repeat, say=say)
    ceilings = measure_ceilings(config)
    costs = model_costs(
        model_config,
        config.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        stage=Stage(config.pipeline_parallel_size - 1, config.pipeline_parallel_size),
        kv_dtype=config.kv_dtype,
    )
    baseline = median_low(one.output_rate for one in measured.passes)
    results: list[AblationResult] = []
    for ablation in ablations:
        say(f"ablation {ablation.name}")
        try:
            ablated = _measure(ablation.config, requests, data_parallel_size=data_parallel_size, repeat=repeat, say=say)
        except (ConfigError, CapacityError) as error:  # this one does not work here, but others may
            results.append(AblationResult(name=ablation.name, left_out=str(error)))
            continue
        rates = [one.output_rate for one in ablated.passes]
        rate = median_low(rates)
        results.append(
            AblationResult(name=ablation.name, output_rates=rates, output_rate=rate, difference=rate / baseline - 1)
        )
    return BenchResult(
        model=model,
        date=date,
        layout=_layout(config, measured.ready, data_parallel_size),
        workload=workload,
        adapters=adapters,
        images=images,
        data_parallel_size=data_parallel_size,
        ready_seconds=measured.ready_seconds,
        ready=measured.ready,
        peak_bytes=measured.peak_bytes,
        ceilings=ceilings,
        runs=[run_of(one, costs, ceilings) for one in measured.passes],
        timelines=[one.records[0] for one in measured.passes],
        ablations=results,
    )


def _layout(config: EngineConfig, ready: EngineReady, data_parallel_size: int) -> BenchLayout:
    replicas = [msgspec.structs.replace(config, replica=replica) for replica in range(data_parallel_size)]
    gpus = [replica.gpu_index(rank) for replica in replicas for rank in range(config.num_ranks)]
    return BenchLayout(
        device=ready.memory[0].device,
        gpus=gpus if config.device == "cuda" else [],
        dtype=config.weights_type,
        kv_cache_dtype=config.kv_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_expert_parallel=config.enable_expert_parallel,
        enable_attention_dp=config.enable_attention_dp,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements of one set of replicas, from start to shutdown."""

    ready_seconds: float
    ready: EngineReady
    passes: list[Pass]
    peak_bytes: list[list[int]]


def _measure(
    config: EngineConfig,
    requests: Sequence[Request],
    *,
    data_parallel_size: int,
    repeat: int,
    say: Callable[[str], None],
) -> _Measured:
    """Start the replicas, warm them up with a few tokens, time the passes, and shut the replicas down."""
    engines = Engines(config, data_parallel_size)
    try:
        ready = engines.wait_ready()
        copies = f" in each of {data_parallel_size} copies" if data_parallel_size > 1 else ""
        say(f"ready in {engines.ready_seconds:.1f} s; KV cache for {ready.kv_cache_tokens:,} tokens{copies}")
        for note in ready.notes:
            say(note)
        input_len = min(8, config.max_model_len - 1)
        output_len = min(4, config.max_model_len - input_len)
        warm_up = Workload(
            num_requests=2 * data_parallel_size,
            input_len=(input_len, input_len),
            output_len=(output_len, output_len),
        )
        engines.run(warm_up.requests(vocab_size=8))
        say(f"running {len(requests):,} requests; fewer with --num-requests")
        passes = []
        for number in range(repeat):
            passes.append(engines.run(requests))
            say(f"run {number + 1} of {repeat}: {passes[-1].output_rate:,.0f} output tokens/s")
        peak_bytes = engines.finish()
    finally:
        engines.close()
    return _Measured(ready_seconds=engines.ready_seconds, ready=ready, passes=passes, peak_bytes=peak_bytes)
