"""What a run did, for its end: rows, errors by type, tokens, rates and where the time went."""

from __future__ import annotations

import msgspec

from nvcli.job_run.progress.display import format_seconds

_SHOWN_SECONDS = 0.05
"""Parts of the start-up and of the loop that took less are left out."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a finished run. Seconds are wall-clock; parts may overlap."""

    output: str
    rows: int
    """Of the whole output, those of earlier runs included."""
    rows_resumed: int = 0
    """Answered by earlier runs; all figures but `rows` and `errors` leave them out."""
    errors: dict[str, int]
    """Failed rows by error type, those of earlier runs included."""
    was_complete: bool = False
    """There was nothing to do."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_seconds: float
    generation_seconds: float
    """From the first request to the last answer."""
    startup: dict[str, float]
    """Of the slowest engine, by part."""
    tokenizer_load_seconds: float
    reading_seconds: float
    """Reading and parsing, in the background; with waiting for the input."""
    tokenizing_seconds: float = 0.0
    """In the background."""
    loop_seconds: dict[str, float] = {}
    """The time of the loop between rows and engines, by part; `pipeline.Pipeline` names them."""
    num_preemptions: int = 0
    num_lost_engines: int = 0
    """Copies of the model that died, and whose rows others took over."""
    rows_deduplicated: int = 0
    """Answered with the answer of an equal row; not in the token counts."""
    deduplicated_tokens: int = 0
    """Prompt and answer of those rows."""

    @property
    def rows_failed(self) -> int:
        return sum(self.errors.values())


def format_summary(summary: Summary) -> str:
    """A few lines of plain text."""
    answered = summary.rows - summary.rows_failed
    if summary.was_complete:
        lines = [f"{summary.output} is complete: {answered:,} of {summary.rows:,} rows answered; nothing to do"]
    else:
        lines = [f"{answered:,} of {summary.rows:,} rows answered in {format_seconds(summary.total_seconds)}"]
        lines[0] += f" ({summary.rows_resumed:,} by an earlier run)" if summary.rows_resumed else ""
        lines[0] += "" if summary.output == "-" else f" → {summary.output}"
    if summary.errors:
        by_type = sorted(summary.errors.items(), key=lambda item: -item[1])
        lines.append("  failed    " + ", ".join(f"{name} {count:,}" for name, count in by_type))
        lines.append("            --retry-errors tries these rows again")
    if summary.was_complete:
        return "\n".join(lines)
    cached = ""
    if summary.cached_tokens:
        share = summary.cached_tokens / summary.prompt_tokens
        cached = f" ({summary.cached_tokens:,} from the prefix cache, {share:.0%})"
    lines.append(f"  tokens    prompt {summary.prompt_tokens:,}{cached}, generated {summary.completion_tokens:,}")
    if summary.rows_deduplicated:
        rows = "row" if summary.rows_deduplicated == 1 else "rows"
        lines.append(
            f"  equal     {summary.rows_deduplicated:,} {rows} answered with the answer of an equal row "
            f"({summary.deduplicated_tokens:,} tokens not computed)"
        )
    if summary.generation_seconds > 0:
        seconds = summary.generation_seconds
        lines.append(
            f"  speed     {summary.completion_tokens / seconds:,.0f} generated and "
            f"{summary.prompt_tokens / seconds:,.0f} prompt tokens/s, "
            f"{(summary.rows - summary.rows_resumed) / seconds:,.1f} rows/s"
        )
    parts = {part: seconds for part, seconds in summary.startup.items() if seconds >= _SHOWN_SECONDS}
    startup = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in parts.items())
    lines.append(
        f"  time      generating {format_seconds(summary.generation_seconds)}"
        + (f", start-up ({startup})" if startup else "")
        + f"; meanwhile tokenizer import {format_seconds(summary.tokenizer_load_seconds)}, "
        f"reading {format_seconds(summary.reading_seconds)}, tokenizing {format_seconds(summary.tokenizing_seconds)}"
    )
    loop = sorted(summary.loop_seconds.items(), key=lambda item: -item[1])
    shown = [f"{part} {format_seconds(seconds)}" for part, seconds in loop if seconds >= _SHOWN_SECONDS]
    if shown:
        lines.append(f"  parent    {', '.join(shown)}")
    if summary.num_lost_engines:
        lost = "1 copy of the model" if summary.num_lost_engines == 1 else f"{summary.num_lost_engines} copies"
        lines.append(f"  note      {lost} died on the way; the others took over, and all answers are as they would be")
    if summary.num_preemptions:
        lines.append(
            f"  note      {summary.num_preemptions:,} preemptions: the KV cache was full; "
            "more memory or a smaller `max_num_seqs` avoids computing these twice"
        )
    return "\n".join(lines)
