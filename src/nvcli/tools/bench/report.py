"""A benchmark's result as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.core.messages import EngineReady, KVGroup
from nvcli.core.system.versions import installed_versions
from nvcli.tools.bench.ablation import AblationResult
from nvcli.tools.bench.bench import BenchResult
from nvcli.tools.bench.measures import Run
from nvcli.tools.bench.roofline import Roofline

_GIB = 2**30


def format_json(result: BenchResult) -> str:
    """Return all measurements but the individual steps, as one line of ASCII JSON."""
    fields = msgspec.to_builtins(result)
    del fields["timelines"]
    fields["ready"] = _ready_fields(result.ready)
    fields["versions"] = installed_versions()
    fields["ready_parts"] = result.ready_parts
    fields["output_tokens_per_second"] = result.median.output_rate
    fields["total_tokens_per_second"] = result.median.total_rate
    fields["requests_per_second"] = result.median.request_rate
    fields["images_per_second"] = result.image_rate
    return json.dumps(fields)


def _ready_fields(ready: EngineReady) -> dict[str, Any]:
    """Return an engine's report with named fields; on the wire it and its parts are lists."""
    fields = msgspec.structs.asdict(ready)
    groups: list[KVGroup] = fields.pop("kv_groups")
    fields["group_windows"] = [group.window for group in groups]
    fields["state_groups"] = [number for number, group in enumerate(groups) if group.is_state]
    fields["group_token_bytes"] = [group.token_bytes for group in groups]
    fields["memory"] = [msgspec.structs.asdict(use) for use in ready.memory]
    return fields


def format_result(result: BenchResult) -> str:
    """Return the report as plain text."""
    run, ready, ceilings = result.median, result.ready, result.ceilings
    rates = [r.output_rate for r in result.runs]
    spread = f" (of {len(rates)} runs: {min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else ""
    copies = f", {result.data_parallel_size} copies" if result.data_parallel_size > 1 else ""
    layout = result.layout
    kv_type = "" if layout.kv_cache_dtype == layout.dtype else f"{layout.kv_cache_dtype}, "
    lines = [
        f"{result.model}: {run.num_requests} requests, {run.prompt_tokens:,} prompt tokens, "
        f"{run.output_tokens:,} output tokens{copies}",
        f"  output tokens/s   {run.output_rate:,.0f}{spread}",
        f"  total tokens/s    {run.total_rate:,.0f}",
        f"  requests/s        {run.request_rate:.2f}",
        f"  seconds           {run.seconds:.2f}",
        f"  of the limit      {100 * run.roofline_share:.0f} % (measured here: "
        f"memory {ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
        f"matrix products {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s)",
        f"  time to ready     {result.ready_seconds:.2f} s ({_parts(result.ready_parts)})",
        f"  attention         {ready.attention_backend}",
        f"  KV cache          {kv_type}{ready.kv_cache_bytes / _GIB:.2f} GiB, "
        f"{100 * run.peak_kv_share:.1f} % used at most, {100 * run.mean_kv_share:.1f} % on average; "
        f"{run.num_preemptions} preemptions",
        f"  prefix cache      {run.cached_tokens:,} prompt tokens found, not computed "
        f"({100 * run.cached_share:.1f} %), {run.computed_prompt_tokens:,} computed",
        *_draft_lines(run),
        *_adapter_lines(result),
        *_image_lines(result),
        f"  peak memory       {_peaks(result.peak_bytes)}",
        *_phase_lines(run),
        *_step_lines(run),
    ]
    if result.ablations:
        lines += ["", *format_ablations(run.output_rate, result.ablations)]
    return "\n".join(lines)


def format_ablations(baseline: float, ablations: list[AblationResult]) -> list[str]:
    """Return a table of the tokens per second without each part, and of the difference it makes."""
    width = max(len("as configured"), *(len(_label(ablation)) for ablation in ablations))
    lines = [
        f"{'ablation':<{width}}  {'output tokens/s':>15}  difference",
        f"{'as configured':<{width}}  {baseline:>15,.0f}",
    ]
    for ablation in ablations:
        if ablation.output_rate is None or ablation.difference is None:
            lines.append(f"{_label(ablation):<{width}}  left out: {ablation.left_out}")
        else:
            lines.append(
                f"{_label(ablation):<{width}}  {ablation.output_rate:>15,.0f}  {100 * ablation.difference:>+8.1f} %"
            )
    return lines


def _label(ablation: AblationResult) -> str:
    return ablation.name if "=" in ablation.name else f"without {ablation.name}"


def _draft_lines(run: Run) -> list[str]:
    drafts = run.speculation
    if drafts is None:
        return []
    return [
        f"  drafts            {drafts.accepted_tokens:,} of {drafts.drafted_tokens:,} drafted tokens taken "
        f"({100 * drafts.accepted_tokens / drafts.drafted_tokens:.0f} %), {drafts.tokens_per_step:.2f} tokens a step"
    ]


def _adapter_lines(result: BenchResult) -> list[str]:
    adapters = result.adapters
    if adapters is None:
        return []
    rank = "" if adapters.made_up_rank is None else f", made up, of rank {adapters.made_up_rank}"
    merged = f"; {adapters.num_merged:,} merged in turn" if adapters.num_merged else ""
    return [
        f"  LoRA adapters     {adapters.num_adapters:,}{rank}{merged}; at most {result.ready.max_loaded_adapters:,} on "
        "each device at a time"
    ]


def _image_lines(result: BenchResult) -> list[str]:
    images = result.images
    if images is None:
        return []
    size = "{:,} × {:,}".format(*images.size)
    return [
        f"  images/s          {result.image_rate:,.1f} of {size} pixels and {images.num_tokens:,} tokens; preparing "
        f"alone {images.prepared_per_second:,.1f} with {images.num_processes} at a time"
    ]


def _phase_lines(run: Run) -> list[str]:
    lines = [
        f"  {name:<17} {limit.seconds:.2f} s ({100 * limit.seconds / run.seconds:.0f} % of the time), "
        f"{_against_limit(limit)}"
        for name, limit in run.phases.items()
        if limit.seconds
    ]
    return [*lines, f"  no step running   {run.idle_seconds:.2f} s ({100 * run.idle_seconds / run.seconds:.0f} %)"]


def _step_lines(run: Run) -> list[str]:
    lines = []
    for mode, steps in run.steps.items():
        lines.append(
            f"  {mode.lower():<7} steps     {steps.count}, {steps.total / 1e3:.2f} s; ms each: "
            f"median {steps.median:.3f}, p90 {steps.p90:.3f}, p99 {steps.p99:.3f}; "
            f"idle: median {steps.idle_median:.3f}, p99 {steps.idle_p99:.3f}; {100 * steps.graph_share:.0f} % as graphs"
        )
        lines.append(f"{'':<20}{_against_limit(run.limits[mode])}")
    return lines


def _against_limit(limit: Roofline) -> str:
    parts = _parts(limit.limit_by_part)
    return (
        f"{100 * limit.share:.0f} % of the limit, {limit.limit_seconds:.2f} s{f' ({parts})' if parts else ''}; "
        f"memory used {100 * limit.bandwidth_share:.0f} %, matrix units {100 * limit.flops_share:.0f} %"
    )


def _parts(seconds_by_part: Mapping[str, float]) -> str:
    """Format the parts that are not zero at two decimals."""
    return ", ".join(f"{part} {seconds:.2f}" for part, seconds in seconds_by_part.items() if seconds >= 0.005)


def _peaks(peak_bytes: list[list[int]]) -> str:
    """Format the peak memory of each rank of each replica."""
    return ", ".join(
        f"{f'copy {replica} ' if len(peak_bytes) > 1 else ''}rank {rank} {num_bytes / _GIB:.2f} GiB"
        for replica, ranks in enumerate(peak_bytes)
        for rank, num_bytes in enumerate(ranks)
    )
