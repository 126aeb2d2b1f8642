"""Shows how a run gets on: a bar on a terminal, a line every ten seconds elsewhere, or nothing.

Writes to the stream it is given (standard error) and to nothing else. The estimate of the time left goes by the share
of the input that is done, in bytes, because the number of rows is not known before the input is read to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO

from nvcli.jobs.reader import RowReader
from nvcli.pipeline.counts import Counts
from nvcli.pipeline.feeder import Feeder

if TYPE_CHECKING:
    import rich.progress

ProgressMode = Literal["auto", "bar", "plain", "none"]

PLAIN_SECONDS = 10.0
BAR_SECONDS = 0.2


class Progress:
    """Base of the three kinds, and the one that shows no progress. `note` lines are shown by all."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, line: str) -> None:
        """Say something that is not progress: what was chosen, what to look out for."""
        self._stream.write(f"nvcli: {line}\n")
        self._stream.flush()

    def update(self, view: RunView) -> None:
        """Call as often as you like."""

    def close(self) -> None:
        """Leave the stream so that others can write to it. Idempotent."""


class RunView:
    """The figures of a run as progress shows them."""

    def __init__(
        self, counts: Counts, reader: RowReader, feeder: Feeder, *, limit: int | None, started_at: float
    ) -> None:
        self.counts = counts
        self._reader = reader
        self._feeder = feeder
        self._limit = limit
        self._started_at = started_at

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def is_generating(self) -> bool:
        return self.counts.started_at is not None

    @property
    def rows_total(self) -> int | None:
        """Exact once the input is read to its end."""
        return self._reader.rows_read if self._feeder.all_read else None

    @property
    def share_done(self) -> float | None:
        """0 to 1; None where it cannot be told."""
        done, read = self.counts.rows_done + self.counts.rows_resumed, self._reader.rows_read
        total: float | None = self.rows_total
        if total is None and self._reader.bytes_total and read and self._reader.bytes_read:
            total = read * max(1.0, self._reader.bytes_total / self._reader.bytes_read)
        if self._limit is not None:
            total = min(total, self._limit) if total is not None else self._limit
        return min(1.0, done / total) if total else None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, from the first request on."""
        if self.counts.started_at is None:
            return 0.0
        return self.counts.generated_tokens / max(1e-3, time.monotonic() - self.counts.started_at)

    @property
    def seconds_left(self) -> float | None:
        if self.counts.started_at is None or not self.share_done:
            return None
        return (time.monotonic() - self.counts.started_at) * (1 - self.share_done) / self.share_done

    def rows_text(self) -> str:
        total = self.rows_total
        rows_done = self.counts.rows_done + self.counts.rows_resumed
        done = f"{rows_done:,}" if total is None else f"{rows_done:,}/{total:,}"
        failed = f" ({self.counts.rows_failed:,} failed)" if self.counts.rows_failed else ""
        return f"{done} rows{failed}"

    def rates_text(self) -> str:
        if not self.is_generating:
            return "loading the model"
        left = self.seconds_left
        eta = f", {format_seconds(left)} left" if left is not None else ""
        return f"{self.tokens_per_second:,.0f} tokens/s, KV {self.counts.kv_use:.0%}{eta}"


class PlainProgress(Progress):
    """One line every ten seconds."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._next = clock() + PLAIN_SECONDS

    def update(self, view: RunView) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + PLAIN_SECONDS
        share = view.share_done
        percent = f"{share:.0%}, " if share is not None else ""
        self.note(f"{format_seconds(view.seconds)}: {percent}{view.rows_text()}, {view.rates_text()}")


class BarProgress(Progress):
    """A bar in the last line of the terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._next = 0.0

    def note(self, line: str) -> None:
        if self._bar is None:
            super().note(line)
        else:
            self._bar.console.print(f"nvcli: {line}", markup=False, highlight=False, soft_wrap=True)

    def update(self, view: RunView) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BAR_SECONDS
        if self._bar is None or self._task is None:
            self._bar, self._task = self._start()
        share = view.share_done
        self._bar.update(
            self._task,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            rows=view.rows_text(),
            rates=view.rates_text(),
        )
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> tuple[rich.progress.Progress, rich.progress.TaskID]:
        from rich.console import Console  # takes a while to import: not for `--help`, nor before the engines start
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[rows]}, {task.fields[rates]}", markup=False),
            console=Console(file=self._stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.start()
        return bar, bar.add_task("", total=None, rows="", rates="")


def make_progress(mode: ProgressMode, stream: TextIO) -> Progress:
    """auto: a bar on a terminal, else plain lines."""
    if mode == "auto":
        mode = "bar" if stream.isatty() else "plain"
    kinds: dict[str, type[Progress]] = {"bar": BarProgress, "plain": PlainProgress, "none": Progress}
    return kinds[mode](stream)


def format_seconds(seconds: float) -> str:
    """8.2s, 3m05s, 2h07m"""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
