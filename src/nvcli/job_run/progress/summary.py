"""The summary of a run at its end: rows, errors by type, tokens, rates and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nvcli.job_run.counts import Counts
from nvcli.job_run.progress.display import format_seconds
from nvcli.jobs.job import ROW_FAULTS
from nvcli.jobs.output.manifest import Finished

_SHOWN_SECONDS = 0.05
"""Parts of the start-up and of the loop that took less are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """The times of a run in wall-clock seconds; parts may overlap."""

    total: float
    generating: float = 0.0
    """The time from the first request to the last answer."""
    startup: dict[str, float] = field(default_factory=dict)
    """The start-up of the slowest replica, by part."""
    loading_tokenizer: float = 0.0
    reading: float = 0.0
    """Reading and parsing in the background, with waiting for the input."""
    tokenizing: float = 0.0
    """Tokenizing in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The work of a finished run."""

    output: str
    rows: int
    """Rows of the whole output, with those of earlier runs."""
    errors: dict[str, int]
    """Failed rows of the whole output by error type."""
    counts: Counts
    """The counts of this run."""
    times: RunTimes
    row_warnings: Sequence[str] = ()
    """Warnings about rows of this run, with their counts."""
    was_complete: bool = False
    """The output was complete before, and there was nothing to do."""
    can_continue: bool = True
    """Whether another run can continue the output."""

    @property
    def rows_failed(self) -> int:
        return sum(self.errors.values())


def summary_of_complete_job(output: str, finished: Finished, seconds: float) -> Summary:
    """Make the summary of a run that found its output complete, after so many seconds."""
    return Summary(
        output=output,
        rows=finished.rows,
        errors=finished.errors,
        counts=Counts(),
        times=RunTimes(total=seconds),
        was_complete=True,
    )


def format_summary(summary: Summary) -> str:
    """Return the summary as a few lines of plain text."""
    lines = [_first_line(summary), *_error_lines(summary)]
    if not summary.was_complete:
        lines += [*_token_lines(summary), *_time_lines(summary), *_notes(summary.counts)]
        lines += [f"  note      {warning}" for warning in summary.row_warnings]
    return "\n".join(lines)


def _first_line(summary: Summary) -> str:
    answered = summary.rows - summary.rows_failed
    if summary.was_complete:
        return f"{summary.output} is complete: {answered:,} of {summary.rows:,} rows answered; nothing to do"
    resumed = summary.counts.rows_resumed
    line = f"{answered:,} of {summary.rows:,} rows answered in {format_seconds(summary.times.total)}"
    line += f" ({resumed:,} by an earlier run)" if resumed else ""
    return line if summary.output == "-" else f"{line} → {summary.output}"


def _error_lines(summary: Summary) -> Iterator[str]:
    if summary.errors:
        by_type = sorted(summary.errors.items(), key=lambda item: -item[1])
        yield "  failed    " + ", ".join(f"{name} {count:,}" for name, count in by_type)
        at_fault = sum(count for name, count in summary.errors.items() if name in ROW_FAULTS)
        others = summary.rows_failed - at_fault
        if others and summary.can_continue:
            which = f"{others:,} of these rows" if at_fault else "these rows"
            yield f"            --retry-errors tries {which} again"
        if at_fault and summary.can_continue:
            which = f"the other {at_fault:,}" if others else "these rows"
            yield f"            mend {which} in the input: --update then answers what was mended"


def _token_lines(summary: Summary) -> Iterator[str]:
    counts, seconds = summary.counts, summary.times.generating
    cached = ""
    if counts.cached_tokens:
        share = counts.cached_tokens / counts.prompt_tokens
        cached = f" ({counts.cached_tokens:,} from the prefix cache, {share:.0%})"
    yield f"  tokens    prompt {counts.prompt_tokens:,}{cached}, generated {counts.completion_tokens:,}"
    if counts.rows_deduplicated:
        rows = "row" if counts.rows_deduplicated == 1 else "rows"
        yield (
            f"  equal     {counts.rows_deduplicated:,} {rows} answered with the answer of an equal row "
            f"({counts.deduplicated_tokens:,} tokens not computed)"
        )
    if seconds > 0:
        yield (
            f"  speed     {counts.completion_tokens / seconds:,.0f} generated and "
            f"{counts.prompt_tokens / seconds:,.0f} prompt tokens/s, "
            f"{(summary.rows - counts.rows_resumed) / seconds:,.1f} rows/s"
        )


def _time_lines(summary: Summary) -> Iterator[str]:
    times = summary.times
    startup = ", ".join(_shown_parts(times.startup.items()))
    yield (
        f"  time      generating {format_seconds(times.generating)}"
        + (f", start-up ({startup})" if startup else "")
        + f"; meanwhile tokenizer import {format_seconds(times.loading_tokenizer)}, "
        f"reading {format_seconds(times.reading)}, tokenizing {format_seconds(times.tokenizing)}"
    )
    loop = _shown_parts(sorted(summary.counts.seconds.items(), key=lambda item: -item[1]))
    if loop:
        yield f"  parent    {', '.join(loop)}"


def _shown_parts(parts: Iterable[tuple[str, float]]) -> list[str]:
    return [f"{part} {format_seconds(seconds)}" for part, seconds in parts if seconds >= _SHOWN_SECONDS]


def _notes(counts: Counts) -> Iterator[str]:
    if counts.num_lost_replicas:
        lost = "1 copy of the model" if counts.num_lost_replicas == 1 else f"{counts.num_lost_replicas} copies"
        yield f"  note      {lost} died on the way; the others took over, and all answers are as they would be"
    if counts.num_preemptions:
        yield (
            f"  note      {counts.num_preemptions:,} preemptions: the KV cache was full; "
            "more memory or a smaller `max_num_seqs` avoids computing these twice"
        )
