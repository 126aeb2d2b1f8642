"""Measures of a recorded pass: rates, times by kind of step, phases against the limit, use of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from nvcli.core.messages import ForwardMode
from nvcli.engine.request import SpeculationFigures, StepRecord
from nvcli.sizing.costs import ModelCosts
from nvcli.tools.bench.engines import Pass, PassTotals
from nvcli.tools.bench.roofline import Ceilings, Phase, Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The steps of one kind. Times are in milliseconds."""

    count: int
    total: float
    median: float
    p90: float
    p99: float
    idle_median: float
    """Time for which the device waited for the host, before and during a step."""
    idle_p99: float
    graph_share: float
    """Share of the steps that ran as a CUDA graph, from 0 to 1."""

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
            graph_share=sum(r.is_graph for r in records) / len(records),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(PassTotals):
    """The measures of one pass over the workload.

    With several replicas, seconds of the device are the average over the replicas. `seconds` is the sum of
    `phases["prefill"].seconds`, `phases["decode"].seconds` and `idle_seconds`.
    """

    steps: dict[str, StepTimes]
    """The steps of all replicas, by forward mode."""
    limits: dict[str, Roofline]
    """The steps of all replicas against the device's limit, by forward mode."""
    phases: dict[Phase, Roofline]
    """Both phases against the limit. The time of a mixed step is divided between them in proportion to its limit."""
    idle_seconds: float
    """Seconds without a step on the device."""
    roofline_share: float
    """The limit of all steps divided by `seconds`, which includes host time and idle time."""
    num_preemptions: int
    speculation: SpeculationFigures | None
    """Drafted tokens and those that were taken; None: nothing was drafted."""
    peak_kv_share: float
    """Peak share of a replica's KV blocks in use, from 0 to 1."""
    mean_kv_share: float
    """Mean share of KV blocks in use, weighted by the time of the steps."""

    @property
    def cached_share(self) -> float:
        """Share of the samples' prompt tokens found in the prefix cache, from 0 to 1."""
        return self.cached_tokens / (self.cached_tokens + self.computed_prompt_tokens)

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return self.num_requests / self.seconds


def run_of(recorded: Pass, costs: ModelCosts, ceilings: Ceilings) -> Run:
    """Compute the measures of a pass. `costs` and `ceilings` are those of one rank."""
    num_replicas = len(recorded.records)
    records = [record for steps in recorded.records for record in steps]
    by_mode = {mode.name: [r for r in records if r.mode == mode] for mode in ForwardMode}
    phases: dict[Phase, Roofline] = {
        phase: Roofline.of(records, costs, ceilings, phase=phase).divided(num_replicas)
        for phase in ("prefill", "decode")
    }
    limit_seconds = sum(phase.limit_seconds for phase in phases.values())
    busy_seconds = sum(record.seconds for record in records)
    return Run(
        **{field.name: getattr(recorded, field.name) for field in fields(PassTotals)},
        steps={mode: StepTimes.of(steps) for mode, steps in by_mode.items() if steps},
        limits={mode: Roofline.of(steps, costs, ceilings) for mode, steps in by_mode.items() if steps},
        phases=phases,
        idle_seconds=recorded.seconds - busy_seconds / num_replicas,
        roofline_share=limit_seconds / recorded.seconds,
        num_preemptions=recorded.num_preemptions,
        speculation=recorded.speculation,
        peak_kv_share=max((r.num_used_blocks for r in records), default=0) / recorded.num_blocks,
        mean_kv_share=sum(r.num_used_blocks * r.seconds for r in records) / busy_seconds / recorded.num_blocks
        if busy_seconds
        else 0.0,
    )
