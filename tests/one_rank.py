"""A rank and its scheduler in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import drafting_of
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from rank_executor import RankExecutor


def make_runner(path: Path, device: str = "cuda", **overrides: Any) -> ModelRunner:
    values: dict[str, Any] = {
        "model_path": path,
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": 64,
        "kv_cache_memory": 4 << 30 if device == "cuda" else None,  # not a share of what others leave of the GPU
    }
    context = RankContext(rank=0, report_phase=lambda phase: None)
    return ModelRunner(engine_config(**{**values, **overrides}), context)


def make_scheduler(
    runner: ModelRunner,
    num_blocks: int | None = None,
    *,
    segment_costs: SegmentCosts | None = None,
    prefix_costs: PrefixCosts | None = None,
) -> Scheduler:
    """`num_blocks`: fewer than the rank has. `segment_costs` and `prefix_costs`: see `SchedulerLimits`."""
    assert segment_costs is None or runner.ready.reads_segments
    config = runner.config
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_groups=tuple(runner.ready.kv_groups),
        segment_costs=segment_costs,
        prefix_costs=prefix_costs,
        drafting=drafting_of(config, runner.ready),
        max_loaded_adapters=runner.ready.max_loaded_adapters,
        merged_adapters=config.merged_adapters,
        merged_only_adapters=config.merged_only_adapters,
    )
    num_blocks = num_blocks or runner.ready.num_blocks
    return Scheduler(limits, BlockManager(num_blocks, enable_prefix_caching=config.enable_prefix_caching))


def run_requests(
    runner: ModelRunner, requests: Iterable[Request], scheduler: Scheduler | None = None
) -> dict[int, list[int]]:
    """Answer requests one step after the other: the tokens by request id."""
    outputs = run_to_outputs(runner, requests, scheduler)
    return {number: unpack(output.token_ids).tolist() for number, output in outputs.items()}


def run_to_outputs(
    runner: ModelRunner, requests: Iterable[Request], scheduler: Scheduler | None = None
) -> dict[int, RequestOutput]:
    """Answer requests one step after the other: the last output of each, by request id."""
    scheduler = scheduler or make_scheduler(runner)
    scheduler.add(requests)
    outputs: dict[int, RequestOutput] = {}
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        pending = runner.launch(step.input)
        assert pending is not None
        scheduler.process(step, pending.result())
        outputs.update({output.request_id: output for output in scheduler.take_outputs()})
    return outputs


def make_core(runner: ModelRunner, scheduler: Scheduler | None = None) -> EngineCore:
    """Make an engine of this process, with as many steps in flight as the configuration says."""
    scheduler = scheduler or make_scheduler(runner)
    return EngineCore(scheduler, RankExecutor(runner), max_in_flight=runner.config.max_steps_in_flight)


def run_core(core: EngineCore, requests: Iterable[Request] = ()) -> dict[int, RequestOutput]:
    """Step until every request is answered: the last output of each, by request id."""
    core.add(requests)
    outputs: dict[int, RequestOutput] = {}
    while core.has_work:
        outputs.update({output.request_id: output for output in core.step()})
    return outputs
