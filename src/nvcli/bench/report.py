"""A benchmark's result as text and as JSON."""

from __future__ import annotations

import msgspec

from nvcli.bench.bench import BenchResult


def format_json(result: BenchResult) -> str:
    """Everything that was measured, on one line."""
    fields = msgspec.to_builtins(result)
    fields["ready"] = msgspec.structs.asdict(result.ready)  # its wire form is a list
    fields["output_tokens_per_second"] = result.median.output_rate
    return msgspec.json.encode(fields).decode()


def format_result(result: BenchResult) -> str:
    """The report, as plain text."""
    run, ready, ceilings = result.median, result.ready, result.ceilings
    rates = [r.output_rate for r in result.runs]
    spread = f" (of {len(rates)} runs: {min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else ""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in ready.seconds.items() if seconds >= 0.005)
    lines = [
        f"{result.model}: {run.num_requests} requests, {run.prompt_tokens:,} prompt tokens, "
        f"{run.output_tokens:,} output tokens",
        f"  output tokens/s   {run.output_rate:,.0f}{spread}",
        f"  total tokens/s    {(run.prompt_tokens + run.output_tokens) / run.seconds:,.0f}",
        f"  requests/s        {run.num_requests / run.seconds:.2f}",
        f"  seconds           {run.seconds:.2f}",
        f"  of the limit      {100 * run.roofline_share:.0f} % (measured here: "
        f"memory {ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
        f"matrix products {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s)",
        f"  time to ready     {result.ready_seconds:.2f} s ({parts})",
        f"  attention         {ready.attention_backend}",
        f"  KV cache          {ready.kv_cache_bytes / 2**30:.2f} GiB, {100 * run.peak_kv_share:.1f} % used at most, "
        f"{run.num_preemptions} preemptions",
    ]
    for mode, steps in run.steps.items():
        lines.append(
            f"  {mode.lower():<7} steps    {steps.count}, {steps.total / 1e3:.2f} s; ms each: "
            f"median {steps.median:.3f}, p90 {steps.p90:.3f}, p99 {steps.p99:.3f}; "
            f"idle before: median {steps.idle_median:.3f}, p99 {steps.idle_p99:.3f}"
        )
        limit = run.limits[mode]
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in limit.limit_by_part.items() if seconds >= 0.005)
        lines.append(
            f"{'':<17} {100 * limit.share:.0f} % of the limit, {limit.limit_seconds:.2f} s ({parts}); "
            f"memory used {100 * limit.bandwidth_share:.0f} %, matrix units {100 * limit.flops_share:.0f} %"
        )
    return "\n".join(lines)
