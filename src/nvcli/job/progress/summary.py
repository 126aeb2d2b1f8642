"""The summary of a run at its end: how rows came out, tokens, speed, sampling, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nvcli.core.byte_sizes import counted, format_bytes
from nvcli.core.system.terminal_text import one_line
from nvcli.core.validation import show
from nvcli.engine.request import SpeculationFigures
from nvcli.job.output.manifest import Finished
from nvcli.job.progress.display import Verbosity, format_seconds
from nvcli.job.run.counts import Counts, Example
from nvcli.job.run.prompt_results import perplexity
from nvcli.job.run.settings import DEFAULT, Setting, is_worth_showing, sampling_name

_SHOWN_SECONDS = 0.05
"""Parts of the start-up and of the loop that took less time are left out."""
_EXAMPLE_CHARS = 60
_MESSAGE_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """The times of a run in wall-clock seconds; parts may overlap."""

    total: float
    generating: float = 0.0
    """Time from the first request to the last answer."""
    startup: dict[str, float] = field(default_factory=dict)
    """Start-up times of the slowest replica, by part."""
    loading_tokenizer: float = 0.0
    reading: float = 0.0
    """Reading and parsing in the background, including waits for the input."""
    tokenizing: float = 0.0
    """Tokenizing in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run."""

    output: str
    rows: int
    """Rows of the whole output, including those of earlier runs."""
    errors: dict[str, int]
    """Failed rows of the whole output by error type."""
    counts: Counts
    """The counts of this run."""
    times: RunTimes
    sampling: Sequence[Setting] = ()
    """Sampling of rows without their own; empty if nothing was run."""
    num_gpus: int = 0
    """The GPUs that the run held; 0 on a CPU."""
    limit: int | None = None
    """The `--limit` that ended the job before the end of its inputs; None: they were read to their end."""
    row_warnings: Sequence[str] = ()
    """Warnings about rows of this run, with their counts."""
    was_complete: bool = False
    """Whether the output was complete before, so that there was nothing to do."""

    @property
    def rows_failed(self) -> int:
        return sum(self.errors.values())

    @property
    def gpu_hours(self) -> float:
        """GPUs that the run held times hours, from the command to its end."""
        return self.num_gpus * self.times.total / 3600


def summary_of_complete_job(output: str, finished: Finished, seconds: float) -> Summary:
    """Return the summary of a run that found its output complete, after `seconds`."""
    return Summary(
        output=output,
        rows=finished.rows,
        errors=finished.errors,
        counts=Counts(),
        times=RunTimes(total=seconds),
        was_complete=True,
    )


def format_summary(
    summary: Summary, *, verbosity: Verbosity = "normal", next_steps: Mapping[str, str] | None = None
) -> str:
    """Return the summary as a few lines of plain text; a quiet one is empty unless rows have failed.

    `next_steps` are commands with what they do, as `early_end.next_steps` returns them.
    """
    if verbosity == "quiet":
        return f"{summary.rows_failed:,} of {summary.rows:,} rows failed: {_by_type(summary)}" if summary.errors else ""
    lines = [_first_line(summary)]
    if not summary.was_complete:
        lines += _row_lines(summary.counts)
    lines += _error_lines(summary)
    if not summary.was_complete:
        lines += [*_score_lines(summary.counts), *_token_lines(summary), *_sampling_lines(summary)]
        if verbosity == "verbose":
            lines += _time_lines(summary)
        lines += [*_notes(summary.counts), *(f"  note      {warning}" for warning in summary.row_warnings)]
    if summary.limit is not None:
        lines.append(f"  note      {_limit_note(summary.rows, summary.limit)}")
    for number, (command, effect) in enumerate((next_steps or {}).items()):
        lines.append(f"  {'' if number else 'next':<9} {command}  # {effect}")
    return "\n".join(lines)


def _limit_note(rows: int, limit: int) -> str:
    if rows > limit:
        return f"--limit {limit:,}: later rows that were answered before are kept; without --limit any others follow"
    first = "this is the first row" if limit == 1 else f"these are the first {limit:,} rows"
    return f"{first}; without --limit the others follow"


def _first_line(summary: Summary) -> str:
    answered = summary.rows - summary.rows_failed
    if summary.was_complete:
        return f"{summary.output} is complete: {answered:,} of {summary.rows:,} rows answered; nothing to do"
    resumed = summary.counts.rows_resumed
    line = f"{answered:,} of {summary.rows:,} rows answered in {format_seconds(summary.times.total)}"
    line += f" ({resumed:,} by an earlier run)" if resumed else ""
    return line if summary.output == "-" else f"{line} → {summary.output}"


def _row_lines(counts: Counts) -> Iterator[str]:
    if counts.rows_deduplicated:
        yield (
            f"  equal     {_rows(counts.rows_deduplicated)} answered with the answer of an equal row "
            f"({counted(counts.deduplicated_tokens, 'token')} not computed)"
        )
    for reason, count in counts.outcomes.finish_reasons.most_common():
        example = counts.outcomes.answer_examples[reason][0]
        answers = counted(count, "answer")
        why = " cut at `max_tokens` or `max_model_len`" if reason == "length" else ""
        yield f'  {reason:<9} {answers}{why}, such as {_id(example)}: "{one_line(example.text, _EXAMPLE_CHARS)}"'


def _score_lines(counts: Counts) -> Iterator[str]:
    scores = counts.outcomes.scores
    if scores.rows_with_answer:
        share = scores.rows_correct / scores.rows_with_answer
        yield f"  accuracy  {share:.2%}: {scores.rows_correct:,} of {_rows(scores.rows_with_answer)} with an answer"
    if scores.prompts:
        tokens = f"{counted(scores.prompt_tokens, 'token')} of {_rows(scores.prompts)}"
        yield f"  text      perplexity {perplexity(scores.prompt_logprob, scores.prompt_tokens):,.4g} over {tokens}"


def _error_lines(summary: Summary) -> Iterator[str]:
    examples = summary.counts.outcomes.error_examples
    head = "failed"
    for kind, count in Counter(summary.errors).most_common():
        line = f"  {head:<9} {kind} {count:,}"
        if kind in examples:
            example = examples[kind][0]
            line += f", such as {_id(example)}: {one_line(example.text, _MESSAGE_CHARS)}"
        yield line
        head = ""


def _by_type(summary: Summary) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in Counter(summary.errors).most_common())


def _id(example: Example) -> str:
    return one_line(str(example.id), _EXAMPLE_CHARS)


def _token_lines(summary: Summary) -> Iterator[str]:
    counts, seconds = summary.counts, summary.times.generating
    cached = ""
    # The replicas count the prompt of each sample of a row, and finished rows alone are in the other counts.
    not_computed = max(counts.cached_tokens, counts.engine_cached_tokens)
    if not_computed:
        share = not_computed / counts.engine_prompt_tokens
        of_all = f" of {counts.engine_prompt_tokens:,}" if counts.engine_prompt_tokens > counts.prompt_tokens else ""
        cached = f" ({not_computed:,}{of_all} not computed: in the prefix cache, {share:.0%})"
    generates = counts.completion_tokens > 0
    generated = f", generated {counts.completion_tokens:,}" if generates else ""
    yield f"  tokens    prompt {counts.prompt_tokens:,}{cached}{generated}"
    if saved := counts.engine_total("kv_bytes_saved"):
        yield f"  shared    {format_bytes(saved)} of the KV cache not read again for each row"
    if (drafts := SpeculationFigures.of(counts.replicas)) is not None:
        share = drafts.accepted_tokens / drafts.drafted_tokens
        yield (
            f"  drafts    {drafts.accepted_tokens:,} of {drafts.drafted_tokens:,} drafted tokens were right "
            f"({share:.0%}); {drafts.tokens_per_step:.2f} tokens a step"
        )
    if seconds > 0:
        speed = f"{counts.completion_tokens / seconds:,.0f} generated and " if generates else ""
        yield (
            f"  speed     {speed}{counts.prompt_tokens / seconds:,.0f} prompt tokens/s, "
            f"{counts.rows_done / seconds:,.1f} rows/s"
        )
    if summary.num_gpus:
        gpus = counted(summary.num_gpus, "GPU")
        yield f"  GPUs      {summary.gpu_hours:.3g} GPU-hours ({gpus} for {format_seconds(summary.times.total)})"


def _sampling_lines(summary: Summary) -> Iterator[str]:
    """Yield the sampling of rows without their own, by what set it, and how many rows have their own."""
    by_origin: dict[str, list[str]] = {}
    for setting in summary.sampling:
        if is_worth_showing(setting):
            value = one_line(show(setting.value, _EXAMPLE_CHARS)) if setting.value is not None else "unset"
            by_origin.setdefault(setting.origin, []).append(f"{sampling_name(setting)} {value}")
    origins = sorted(by_origin, key=lambda origin: origin == DEFAULT)
    parts = [f"{', '.join(by_origin[origin])} ({origin})" for origin in origins]
    own = [f"{key} in {_rows(count)}" for key, count in summary.counts.outcomes.own_sampling.most_common()]
    if own:
        parts.append(f"{', '.join(own)} (the row's own)")
    if parts:
        yield f"  sampling  {'; '.join(parts)}"


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
    if num_preemptions := counts.engine_total("num_preemptions"):
        yield (
            f"  note      {num_preemptions:,} preemptions: the KV cache was full; "
            "more memory or a smaller `max_num_seqs` avoids computing these twice"
        )


def _rows(count: int) -> str:
    return counted(count, "row")
