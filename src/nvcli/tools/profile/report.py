"""A memory profile as text, as JSON, and as a stacked bar for each rank, on the terminal or in an SVG or PNG file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.histogram import histogram_lines
from nvcli.core.messages import MemoryUse
from nvcli.sizing.memory_plan import ADAPTERS
from nvcli.tools.bench.plot import save_plot
from nvcli.tools.profile.profile import MemoryProfile

if TYPE_CHECKING:
    from nvcli.tools.profile.profile import MemoryProfile


def format_json(profile: MemoryProfile) -> str:
    """Return the whole profile as one line of ASCII JSON."""
    fields = msgspec.to_builtins(profile)
    fields["ranks"] = [msgspec.structs.asdict(use) for use in profile.ranks]  # their wire form is a list
    return json.dumps(fields)


def format_profile(profile: MemoryProfile) -> str:
    """Return the report as plain text."""
    lines = []
    for number, use in enumerate(profile.ranks):
        # Estimated ranks of a stage are alike.
        if not profile.is_estimate or number % profile.tensor_parallel_size == 0:
            lines += _rank_lines(profile, number, use)
    lines += _capacity_lines(profile)
    lines += _advice_lines(profile)
    return "\n".join(lines)


def _rank_lines(profile: MemoryProfile, number: int, use: MemoryUse) -> list[str]:
    how = "estimated from the configuration; weights are exact" if profile.is_estimate else "measured"
    which = "each rank" if profile.is_estimate and profile.tensor_parallel_size > 1 else f"rank {number}"
    stage = f" (stage {number // profile.tensor_parallel_size})" if profile.pipeline_parallel_size > 1 else ""
    lines = [
        f"{profile.model}, {which} of {len(profile.ranks)}{stage}, on {use.device} of "
        f"{format_bytes(use.total)}, of which the run may use {format_bytes(use.budget)} ({how})"
    ]
    header = f"  {'':<22}{'planned':>12}"
    lines.append(header + (f"{'measured':>12}{'difference':>12}" if use.measured else ""))
    for item, planned in use.planned.items():
        lines.append(f"  {item:<22}{format_bytes(planned):>12}" + _measured(use, item, planned))
        if item == "weights":
            lines += [f"    {group:<20}{format_bytes(size):>12}" for group, size in use.weights.items()]
    left = use.budget - sum(use.planned.values())
    measured_left = use.budget - sum(use.measured.values()) if use.measured else None
    is_over = left < 0 and measured_left is None
    lines.append(
        f"  {'over the budget' if is_over else 'left over':<22}{format_bytes(-left if is_over else left):>12}"
        + (f"{format_bytes(measured_left):>12}" if measured_left is not None else "")
    )
    if use.measured:
        off = sum(use.measured.values()) - sum(use.planned.values())
        lines.append(f"  in all {format_bytes(off)} ({100 * off / use.total:+.2f} % of the device) off the plan")
    return lines


def _measured(use: MemoryUse, item: str, planned: int) -> str:
    if item not in use.measured:
        return ""
    measured = use.measured[item]
    share = f"{100 * (measured - planned) / planned:+.1f} %" if planned else ""
    return f"{format_bytes(measured):>12}{share:>12}"


def _capacity_lines(profile: MemoryProfile) -> list[str]:
    if profile.problem is not None:
        return [f"does not fit: {profile.problem}"]
    lines = [
        f"KV cache: {profile.num_blocks:,} blocks of {profile.block_size} tokens "
        f"({profile.kv_cache_dtype}, {format_bytes(profile.block_bytes)} each): {profile.num_tokens:,} tokens",
        f"  requests of max_model_len ({profile.max_model_len:,} tokens): {profile.full_length_requests:,.1f} at a "
        f"time; max_num_seqs is {profile.max_num_seqs}",
    ]
    if profile.state_blocks:
        lines.append(_states_line(profile))
    if profile.longest_request < profile.max_model_len:
        lines.append(
            f"  warning: not even one fits; a request that grows beyond {profile.longest_request:,} tokens becomes an "
            "error row"
        )
    lengths = profile.lengths
    if lengths is not None:
        failed = f", {lengths.failed_rows:,} rows would fail" if lengths.failed_rows else ""
        lines += [
            f"  requests of the input: {profile.file_requests:,.1f} at a time ({lengths.requests:,} requests{failed}; "
            f"mean {lengths.mean_prompt:,.0f} tokens of prompt, {lengths.mean_total:,.0f} with the answer, longest "
            f"{lengths.longest_total:,})",
            "  lengths of the input's requests, with answers of maximum length",
        ]
        lines += [f"    {line}" for line in histogram_lines(lengths.histogram)]
    return lines


def _states_line(profile: MemoryProfile) -> str:
    """Describe how much of the KV cache recurrent states take."""
    each = profile.state_blocks * profile.block_bytes
    share = min(1.0, profile.max_num_seqs * profile.state_blocks / max(1, profile.num_blocks))
    return (
        f"  recurrent states: {profile.state_blocks} blocks ({format_bytes(each)}) per request, however long it "
        f"is; with max_num_seqs requests {100 * share:.0f} % of the cache"
    )


def _advice_lines(profile: MemoryProfile) -> list[str]:
    if not profile.advice:
        return [
            "no single setting makes room for more requests"
            if profile.problem is None
            else "no single setting makes it fit"
        ]
    lines = ["to make it fit:" if profile.problem is not None else "to run more requests at a time:"]
    return lines + [
        f"  {advice.change:<42} {advice.requests:,.1f} requests, {advice.tokens:,} tokens ({advice.why})"
        for advice in profile.advice
    ]


_STYLES = {
    "weights": ("#4477aa", "W"),
    ADAPTERS: ("#332288", "L"),
    "buffers": ("#66ccee", "B"),
    "activations": ("#228833", "A"),
    "CUDA graphs": ("#ccbb44", "G"),
    "other": ("#ee6677", "O"),
    "KV cache": ("#aa3377", "K"),
    "free": ("#bbbbbb", "."),
}
"""Item → its colour, and the letter that stands for it in pipes, on dumb terminals and with NO_COLOR. The colours are
Paul Tol's, which colour-blind people can tell apart."""
_WIDTH = 79
"""Width of a bar with its name, in characters."""


def parts_of(use: MemoryUse) -> dict[str, int]:
    """Return the bytes of each item, measured if possible, else planned; `free` is the rest of the device."""
    parts = {item: max(0, size) for item, size in (use.measured or use.planned).items()}
    return {**parts, "free": max(0, use.total - sum(parts.values()))}


def print_bars(profile: MemoryProfile) -> None:
    """Print the bars on standard output."""
    from rich.columns import Columns
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    has_colors = console.color_system is not None and not console.no_color
    marks = {item: "█" if has_colors else letter for item, (_, letter) in _STYLES.items()}
    names = [f"rank {number} " for number in range(len(profile.ranks))]
    width = _WIDTH - len(names[-1])
    for name, use in zip(names, profile.ranks, strict=True):
        parts = parts_of(use)
        bar = Text(name)
        whole = max(use.total, sum(parts.values()))
        cells_before = 0
        size_before = 0
        for item, size in parts.items():
            size_before += size
            cells = round(width * size_before / whole)
            bar.append(marks[item] * (cells - cells_before), style=_STYLES[item][0])
            cells_before = cells
        console.print(bar)
    use = profile.ranks[0]
    legend = [
        Text.assemble((f"{marks[item]} ", _STYLES[item][0]), f"{item} {format_bytes(size)} ({_share(size, use.total)})")
        for item, size in parts_of(use).items()
        if size
    ]
    console.print(Padding(Columns(legend, padding=(0, 3)), (0, 0, 1, len(names[0])), expand=False))


def _share(size: int, total: int) -> str:
    percent = 100 * size / total
    return f"{percent:.0f} %" if percent >= 0.5 else "<1 %"


def write_plot(profile: MemoryProfile, path: Path) -> None:
    """Draw the bars into a file. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.6 * len(profile.ranks)), layout="constrained")
    axes = figure.subplots()
    names = [f"rank {number}" for number in range(len(profile.ranks))]
    parts = [parts_of(use) for use in profile.ranks]
    starts = [0.0] * len(names)
    for item, (color, _) in _STYLES.items():
        sizes = [part.get(item, 0) / 2**30 for part in parts]
        if any(sizes):
            axes.barh(names, sizes, left=starts, color=color, label=item)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    how = "estimated" if profile.is_estimate else "measured"
    axes.set_title(f"{profile.model}: memory by rank ({how})")
    figure.legend(loc="outside lower center", ncols=len(_STYLES), frameon=False)
    save_plot(figure, path)
