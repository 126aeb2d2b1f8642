"""A rank and its scheduler in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from rank_executor import RankExecutor

MOST_STEPS = 2_000
"""Steps after which an engine of these tests has come to an end, if it ever does."""


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
    limits = replace(scheduler_limits(config, runner.ready), segment_costs=segment_costs, prefix_costs=prefix_costs)
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
    core.scheduler.add(requests)
    outputs: dict[int, RequestOutput] = {}
    for _ in range(MOST_STEPS):
        if not core.has_work:
            return outputs
        outputs.update({output.request_id: output for output in core.step()})
    raise AssertionError(f"after {MOST_STEPS:,} steps the engine has not come to an end: {core.scheduler.stats}")
