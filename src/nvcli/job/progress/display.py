"""Shows the progress of a run: a bar on a terminal, a line every ten seconds elsewhere, or nothing.

Writes only to the stream it is given (standard error).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from nvcli.job.progress.run_status import RunStatus, RunView

if TYPE_CHECKING:
    import rich.progress

    from nvcli.job.progress.status_file import StatusFile

ProgressMode = Literal["auto", "bar", "plain", "none"]

Verbosity = Literal["quiet", "normal", "verbose"]
"""quiet: errors and warnings only; verbose: also details of how the run works."""

PLAIN_SECONDS = 10.0
BAR_SECONDS = 0.2
BAR_WIDTH = 16
_WIDE = 1.5
"""Ratio of the high end to the low one from which the time left is shown as a range."""
_WITHOUT_CURSOR = ("dumb", "unknown")
"""Terminals without cursor control, which get no bar."""


class Progress:
    """Base class of all displays, which itself shows notes but no progress."""

    def __init__(
        self, stream: TextIO, *, verbosity: Verbosity = "normal", status_file: StatusFile | None = None
    ) -> None:
        """`status_file` is kept up to date too."""
        self._stream = stream
        self._verbosity = verbosity
        self._status_file = status_file

    def note(self, line: str) -> None:
        """Show a line for the user, such as a choice that was made."""
        if self._verbosity != "quiet":
            self._say(line)

    def warn(self, line: str) -> None:
        """Show a line that begins with `warning:`, even in quiet mode."""
        self._say(line)

    def detail(self, line: str) -> None:
        """Show a line in verbose mode."""
        if self._verbosity == "verbose":
            self._say(line)

    def update(self, view: RunView) -> None:
        """Show the state of the run. May be called as often as you like."""
        self._show(view)
        if self._status_file is not None:
            self._status_file.update(view)

    def close(self) -> None:
        """Leave the stream ready for others to write to. Idempotent."""

    def __enter__(self) -> Progress:
        if self._status_file is not None:
            self._status_file.begin(self.warn)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record the end of the run. `error` is what ended it early, if anything did."""
        if self._status_file is not None:
            self._status_file.end(error)

    def _say(self, line: str) -> None:
        self._stream.write(f"nvcli: {line}\n")
        self._stream.flush()

    def _show(self, view: RunView) -> None:
        """Show only the progress."""


class PlainProgress(Progress):
    """Display for logs: one line every ten seconds."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        super().__init__(stream, **options)
        self._clock = clock
        self._next = clock() + PLAIN_SECONDS

    def _show(self, view: RunView) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + PLAIN_SECONDS
        status = view.status()
        percent = f"{status.share_done:.0%}, " if status.share_done is not None else ""
        self._say(f"{format_seconds(status.elapsed_seconds)}: {percent}{rows_text(status)}, {rates_text(status)}")


class BarProgress(Progress):
    """Display for terminals: a bar in the last line."""

    def __init__(self, stream: TextIO, **options: Any) -> None:
        super().__init__(stream, **options)
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._next = 0.0

    def _say(self, line: str) -> None:
        if self._bar is None:
            super()._say(line)
        else:
            self._bar.console.print(f"nvcli: {line}", markup=False, highlight=False, soft_wrap=True)

    def _show(self, view: RunView) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BAR_SECONDS
        if self._bar is None or self._task is None:
            self._bar, self._task = self._start()
        status = view.status()
        text = f"{rows_text(status)}, {rates_text(status)}"
        room = self._bar.console.width - BAR_WIDTH - len(" 100% ") - 1
        self._bar.update(
            self._task,
            total=None if status.share_done is None else 1.0,
            completed=status.share_done or 0.0,
            text=text if len(text) <= room else f"{text[: max(0, room - 1)]}…",
        )
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> tuple[rich.progress.Progress, rich.progress.TaskID]:
        from rich.console import Console  # late: the import takes a while, and `--help` and the engines' start go first
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            BarColumn(bar_width=BAR_WIDTH),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=self._stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.start()
        return bar, bar.add_task("", total=None, text="")


def make_progress(
    mode: ProgressMode,
    stream: TextIO,
    *,
    beside_answers: bool = False,
    verbosity: Verbosity = "normal",
    status_file: StatusFile | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Progress:
    """Make a display. `auto` is a bar on a terminal whose cursor can be moved, else plain lines; quiet: neither.

    `beside_answers` says that answers are written to a terminal. There are plain lines then in place of a bar: answers
    would be written into the bar's line.
    """
    if mode == "auto" and verbosity == "quiet":
        mode = "none"
    if mode == "auto":
        mode = "bar" if stream.isatty() and environ.get("TERM", "").lower() not in _WITHOUT_CURSOR else "plain"
    if mode == "bar" and beside_answers and stream.isatty():
        mode = "plain"
    kinds: dict[str, type[Progress]] = {"bar": BarProgress, "plain": PlainProgress, "none": Progress}
    return kinds[mode](stream, verbosity=verbosity, status_file=status_file)


def rows_text(status: RunStatus) -> str:
    """Return the number of rows as text, such as `200/400 rows (3 failed)`."""
    rows = status.rows
    done = f"{rows.done + rows.resumed:,}" if rows.total is None else f"{rows.done + rows.resumed:,}/{rows.total:,}"
    failed = f" ({rows.failed:,} failed)" if rows.failed else ""
    return f"{done} rows{failed}"


def rates_text(status: RunStatus) -> str:
    """Return time left, rates and load as text, the most important first: narrow terminals cut off the end."""
    if status.state == "starting":  # rows that wait are sent as soon as the model is there
        return "loading the model" if status.waiting else "preparing the first rows"
    rates = status.rates
    parts = []
    if status.eta_seconds is not None and status.eta_low_seconds is not None and status.eta_high_seconds is not None:
        parts.append(f"{format_range(status.eta_low_seconds, status.eta_seconds, status.eta_high_seconds)} left")
    generated = f" {rates.generated_tokens_per_second:,.0f} out" if status.tokens.generated else ""
    parts += [
        f"tokens/s {rates.prompt_tokens_per_second:,.0f} in{generated}",
        f"{status.running:,} running {status.waiting:,} waiting",
        f"KV {status.kv_use:.0%}",
        f"prefix hits {status.prefix_hit_rate:.0%}",
    ]
    return ", ".join(parts)


def format_range(low: float, middle: float, high: float) -> str:
    """Return an uncertain time as text: a range such as `2 to 5 min` if it is wide, or the middle."""
    if high < _WIDE * low or high < 10:
        return format_seconds(middle)
    names = {"s": 1, "min": 60, "h": 3600}
    low_unit, high_unit = (
        next(name for name, size in reversed(names.items()) if seconds >= 1.5 * size or size == 1)
        for seconds in (low, high)
    )
    shortest, longest = max(1, round(low / names[low_unit])), round(high / names[high_unit])
    if low_unit == high_unit:
        return f"{shortest:,} to {longest:,} {high_unit}" if shortest < longest else format_seconds(middle)
    return f"{shortest:,} {low_unit} to {longest:,} {high_unit}"


def format_seconds(seconds: float) -> str:
    """Return a time as text, such as `8.2s`, `3m05s` or `2h07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
