"""`--plot`: step times and KV use over a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.core.messages import ForwardMode
from nvcli.core.system.file_limits import why_not_writable
from nvcli.core.system.regular_file import check_regular
from nvcli.engine.request import StepRecord
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png")
_COLORS = {ForwardMode.DECODE: "tab:blue", ForwardMode.EXTEND: "tab:red", ForwardMode.MIXED: "tab:orange"}


def check_plot(path: Path) -> None:
    """Check, before anything is measured, that the plot can be drawn and written. Raises ConfigError."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: allowed: a name that ends in {' or '.join(_FORMATS)}")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"--plot {path}: its folder does not exist; make it with: mkdir -p {path.parent}")
    if path.exists():
        try:
            check_regular(path)
        except OSError as error:
            raise ConfigError(f"--plot {path}: {error.strerror}; name another file") from None
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise ConfigError(f"--plot {path} cannot be written: {place}: {why_not_writable(place)}; name another file")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed; install it: pip install 'nvcli[plot]'")


def start_times(steps: Sequence[StepRecord]) -> list[float]:
    """Return the start of each step, in seconds after the start of the first."""
    spans = [0.0]
    for step, following in pairwise(steps):
        spans.append(step.seconds + following.idle_seconds)
    return list(accumulate(spans))


def draw_run(path: Path, title: str, steps: Sequence[StepRecord], num_blocks: int) -> None:
    """Draw the `steps` of a replica with `num_blocks` KV blocks. Raises ConfigError if `path` cannot be written."""
    from matplotlib.figure import Figure

    times = start_times(steps)
    figure = Figure(figsize=(10, 6), layout="constrained")
    step_axes, kv_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for mode, color in _COLORS.items():
        chosen = [number for number, step in enumerate(steps) if step.mode == mode]
        if chosen:
            step_axes.scatter(
                [times[number] for number in chosen],
                [steps[number].seconds * 1e3 for number in chosen],
                s=4,
                color=color,
                label=f"{mode.name.lower()} ({len(chosen)})",
            )
    step_axes.set(title=title, ylabel="step time (ms)", ylim=(0, None))
    step_axes.legend(loc="upper right")
    kv_axes.step(times, [100 * step.num_used_blocks / num_blocks for step in steps], where="post", linewidth=1)
    kv_axes.set(ylabel="KV cache in use (%)", xlabel="seconds", ylim=(0, None))
    save_plot(figure, path)


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure to the file of `--plot`. Raises ConfigError if it cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from None
