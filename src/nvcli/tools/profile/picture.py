"""Draws a stacked bar for each rank, on the terminal and as an SVG or PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.messages import MemoryUse
from nvcli.sizing.memory_plan import ADAPTERS
from nvcli.tools.bench.plot import save_plot

if TYPE_CHECKING:
    from nvcli.tools.profile.profile import MemoryProfile

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
