"""A check's report as text, with colours on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from nvcli.core.byte_sizes import counted, format_bytes
from nvcli.core.histogram import histogram_lines
from nvcli.core.system.terminal_text import harmless, one_line
from nvcli.job.progress.display import format_seconds
from nvcli.job.run.settings import Setting, sampling_name
from nvcli.tools.check.check import CheckReport
from nvcli.tools.check.image_counts import ImageReport
from nvcli.tools.check.lengths import PromptLengths
from nvcli.tools.check.machine import Forecast
from nvcli.tools.check.prompts import ShownPrompt

_NAME_WIDTH = 12
_SPECIAL = "bold cyan"
_MESSAGE_CHARS = 240
_ADAPTERS = 8
"""Adapters that are named in the report."""


def format_json(report: CheckReport) -> str:
    """Return the report as JSON on one line."""
    return msgspec.json.encode(report).decode()


def print_report(report: CheckReport, stream: TextIO) -> None:
    """Print the report. Control characters in rows' texts are made harmless."""
    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    for prompt in report.prompts:
        console.print(_prompt(prompt))
    for name, text in _lines(report):
        console.print(Text.assemble((f"{name:<{_NAME_WIDTH}}", "bold"), text))


def _prompt(prompt: ShownPrompt) -> Text:
    """Show a prompt below a line that names its row; a bar marks the prompt's lines."""
    text = Text()
    for piece in prompt.pieces:
        if piece.left_out:
            text.append(f"\n… {piece.left_out:,} tokens are not shown …\n", style="dim")
        else:
            text.append(harmless(piece.text), style=_SPECIAL if piece.special else "")
    title = f"{prompt.place}, id {one_line(str(prompt.id), 60)}: {counted(prompt.tokens, 'token')}"
    if prompt.max_answer_tokens:
        title += f", and an answer of up to {prompt.max_answer_tokens:,}"
    shown = Text.assemble((title, "bold"))
    for line in text.split("\n", allow_blank=True):
        shown.append("\n")
        shown.append("│ ", style="dim")
        shown.append_text(line)
    shown.append("\n")
    return shown


def _lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Yield the report's lines, each with its name; continuation lines have an empty name."""
    which = "" if report.is_complete else ", not all of the input"
    good = report.rows - report.rows_failed
    yield "rows", f"{report.rows:,}{which}: {good:,} can be answered, {report.rows_failed:,} cannot"
    for error in report.errors:
        yield "", f"{error.count:,} {error.type}; the first: {one_line(error.message, _MESSAGE_CHARS)}"
    if report.lengths is not None:
        yield from _length_lines(report.lengths)
    if report.images is not None:
        yield from _image_lines(report.images)
    yield from _repetition_lines(report)
    for number, note in enumerate(report.notes):
        yield "" if number else "form", one_line(note)
    for number, warning in enumerate(report.warnings):
        yield "" if number else "warnings", one_line(warning)
    for number, each in enumerate(report.sampling):
        yield "" if number else "sampling", f"{sampling_name(each)} {_sampling_value(each)} ({one_line(each.origin)})"
    if report.rows_with_own_sampling:
        yield "", f"{counted(report.rows_with_own_sampling, 'row')} with their own sampling"
    yield "model", f"{report.model}: {report.dtype}, at most {report.max_model_len:,} tokens per prompt and answer"
    yield from _adapter_lines(report)
    yield from _machine_lines(report)
    for number, forecast in enumerate(report.forecasts if report.answers else ()):
        yield "" if number else "to generate", _forecast(forecast, report)
    rate = report.rows / report.seconds if report.seconds else 0.0
    took = format_seconds(report.seconds)
    yield "checked", f"in {took}, {rate:,.0f} rows/s: the fastest rate at which a run here can read its input"


def _length_lines(lengths: PromptLengths) -> Iterator[tuple[str, str]]:
    yield (
        "prompts",
        f"{counted(lengths.total, 'token')}; of one: least {lengths.least:,}, median {lengths.median:,}, mean "
        f"{lengths.mean:,.1f}, 95 % up to {lengths.p95:,}, most {lengths.most:,}",
    )
    for line in histogram_lines(lengths.histogram):
        yield "", line


def _image_lines(images: ImageReport) -> Iterator[tuple[str, str]]:
    tokens = images.tokens
    yield (
        "images",
        f"{tokens.count:,} in {counted(images.rows, 'row')}: {counted(tokens.total, 'token')}; of one: least "
        f"{tokens.least:,}, median {tokens.median:,}, most {tokens.most:,}",
    )
    shown = [f"{size.images:,} of {size.width:,} × {size.height:,}" for size in images.sizes]
    others = [f"{counted(images.other_sizes, 'other size')}"] if images.other_sizes else []
    yield "", f"pixels that the model gets: {', '.join([*shown, *others])}"


def _repetition_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    least = "at least " if report.may_miss_equal_rows else ""
    if report.equal_rows:
        yield "equal", f"{least}{counted(report.equal_rows, 'row')} will get the answer of an equal row"
    if report.repeated_prompts:
        yield (
            "" if report.equal_rows else "equal",
            f"{least}{counted(report.repeated_prompts, 'row')} with the prompt of an earlier row but their own "
            "answer, because it is sampled",
        )
    if report.prompt_tokens_to_compute:
        cached, about = report.cached_tokens, "" if report.cached_tokens_are_exact else "about "
        share = cached / report.prompt_tokens_to_compute
        saved = f"; the prefix cache saves up to {about}{cached:,} of them ({share:.0%})" if cached else ""
        yield "to compute", f"{counted(report.prompt_tokens_to_compute, 'prompt token')}{saved}"


def _adapter_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Say how many rows each adapter has, those with the most first, and how many adapters run at a time."""
    if not report.adapters:
        return
    by_rows = sorted(report.adapters, key=lambda each: -each.rows)
    shown = [f"{one_line(each.name)} (rank {each.rank}) {counted(each.rows, 'row')}" for each in by_rows[:_ADAPTERS]]
    others = by_rows[_ADAPTERS:]
    if others:
        shown.append(f"{len(others):,} others {counted(sum(each.rows for each in others), 'row')}")
    yield "adapters", ", ".join([*shown, f"none {counted(report.rows_without_adapter, 'row')}"])
    machine = report.machine
    if machine.adapters_at_once:
        where, size = "each GPU" if machine.gpus else "the CPU", format_bytes(machine.adapter_bytes)
        yield "", f"{machine.adapters_at_once:,} at a time on {where}, where they take {size}"


def _machine_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    machine = report.machine
    if machine.gpus:
        kinds = dict.fromkeys(machine.gpus)
        yield "GPUs", ", ".join(f"{machine.gpus.count(kind)} × {kind}" for kind in kinds)
    else:
        yield "device", report.device
    if machine.fits is False:
        yield "", f"the model does not fit: {machine.note}"
        return
    fits = "the model fits" if machine.fits else "cannot tell whether the model fits"
    yield "", f"{fits}; {machine.note}" if machine.note else fits


def _forecast(forecast: Forecast, report: CheckReport) -> str:
    length = forecast.answer_tokens
    tokens, answers = counted(forecast.generated_tokens, "token"), counted(report.answers, "answer")
    if length is None:
        text = f"at most {tokens}, if {'the answer runs' if report.answers == 1 else f'all {answers} run'} to the limit"
    else:
        text = f"{tokens} in {answers} of {length:,} tokens, or fewer where the limit is lower"
    if forecast.seconds is None:
        return text
    guessed = " (a guess: the speed of these GPUs is not known)" if report.machine.speed_is_guessed else ""
    return f"{text}: about {format_seconds(forecast.seconds)} once the model is loaded{guessed}"


def _sampling_value(each: Setting) -> str:
    if sampling_name(each) == "max_tokens" and each.value is None:
        return "as many as the prompt leaves"
    return one_line(msgspec.json.encode(each.value).decode(), 80)
