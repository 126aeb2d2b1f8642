"""The command line: parses, calls, prints, and turns errors into exit codes. No logic.

Only typer is imported at the top, so that help and errors of configuration come at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from nvcli.cli_options import (
    ConfigOption,
    DpOption,
    JsonOption,
    ModelOption,
    PpOption,
    SetOption,
    ShapeOption,
    TpOption,
)
from nvcli.standard_streams import secure_standard_streams

if TYPE_CHECKING:
    from nvcli.errors import NvcliError

EXIT_CODES = """Exit codes: 0 every row was answered; 1 some rows carry errors; 2 usage, configuration or model;
3 the engine or the disk failed; 130 interrupted. After 1 by --max-errors, 3 and 130 the same command goes on."""

app = typer.Typer(
    name="nvcli",
    help="""Offline LLM generation on one machine: a JSONL file in, a JSONL file out.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli doctor --model Qwen/Qwen3-8B --tp 2
      nvcli COMMAND --help
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class OrderChoice(StrEnum):
    INPUT = "input"
    COMPLETION = "completion"


class DeviceChoice(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class ProgressChoice(StrEnum):
    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    NONE = "none"


def main() -> None:
    """The `nvcli` command."""
    secure_standard_streams()
    signal.signal(signal.SIGINT, _interrupt)  # a job has a way of its own, while it runs
    try:
        code = _run()
    except _Interrupted:
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave(code)


def _run() -> int:
    """Its exit code."""
    from nvcli.errors import NvcliError, OutputError, TooManyErrors, WorkerError

    try:
        app(prog_name="nvcli")  # ends with SystemExit, its own usage errors included (2)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except _Interrupted as end:
        _say(f"interrupted; {end}")
        code = 130
    except _OutputGone:
        code = 141  # as a command that SIGPIPE ends
    except (WorkerError, OutputError) as error:
        _say_failure(error)
        code = 3
    except TooManyErrors as error:
        _say(f"ended: {error}")
        code = 1
    except NvcliError as error:
        _say(f"error: {error}")
        code = 2
    except Exception:
        import traceback

        traceback.print_exc()
        _say("this is a bug in nvcli; please report it with the lines above")
        code = 3
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        from nvcli.versions import describe_versions

        typer.echo(describe_versions())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of nvcli, Python, torch with its CUDA, and Triton.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog=EXIT_CODES,
    help="""Answer every row of INPUT with the model, into one output file.

    INPUT is JSONL: a row has `prompt`, `messages` or `prompt_token_ids`, and may have `id` and `sampling`; its other
    keys are passed through. Rows of OpenAI batch files are answered in OpenAI's form. `-` is standard input, a quoted
    pattern names many files; files may be .gz, .zst or .parquet, and so may the output.

    An output that is there is continued: the same command finishes a job that was cut short.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli generate questions.jsonl -m Qwen/Qwen3-8B --tp 2 -o answers.jsonl
      nvcli generate a.jsonl b.jsonl.gz -c configs/demo.yaml -o out.jsonl --set sampling.temperature=0
      cat questions.jsonl | nvcli generate - -m demo -o - --progress none | jq .choices[0].text
    """,
)
def generate(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Input files, or - for standard input.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Output file, or -. Without it x.jsonl → x.out.jsonl."),
    ] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    dp: DpOption = None,
    overrides: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start an existing output anew.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Answer the failed rows of an existing output again.")
    ] = False,
    max_errors: Annotated[
        int | None, typer.Option("--max-errors", metavar="N", min=0, help="End the job when more rows failed.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="When a copy of the model dies, the others take over its rows.")
    ] = False,
    order: Annotated[OrderChoice | None, typer.Option("--order", help="Order of the output's rows.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows.")] = None,
    progress: Annotated[ProgressChoice, typer.Option("--progress", help="How to show progress.")] = ProgressChoice.AUTO,
    progress_file: Annotated[
        Path | None,
        typer.Option("--progress-file", metavar="FILE", help="Keep progress as JSON in FILE, replaced every second."),
    ] = None,
) -> None:
    from nvcli.config import find_config_file, load_run_config

    config_file = find_config_file(config)
    flags = {
        "--model": model,
        "--tp": _size(tp),
        "--pp": pp,
        "--dp": _size(dp),
        "--order": order.value if order else None,
        "--max-errors": max_errors,
        "--keep-going": keep_going or None,
    }
    run = load_run_config(config_file, overrides or (), flags)

    from nvcli.errors import OutputError, TooManyErrors, WorkerError, reworded
    from nvcli.jobs.files import job_files
    from nvcli.jobs.resume_hint import resume_hint
    from nvcli.jobs.sink import OutputClosed
    from nvcli.pipeline.generate import generate as run_job
    from nvcli.pipeline.progress import make_progress
    from nvcli.pipeline.progress_file import ProgressFile
    from nvcli.pipeline.summary import format_summary

    started = time.time()
    shown = make_progress(progress.value, sys.stderr)
    if progress_file is not None:
        shown = ProgressFile(progress_file, shown, taken=job_files(inputs, output))
    if config is None and config_file is not None:
        shown.note(f"using the configuration in {config_file}; --config names another")
    try:
        with shown:
            summary = run_job(
                run,
                inputs=inputs,
                output=output,
                progress=shown,
                overwrite=overwrite,
                retry_errors=retry_errors,
                limit=limit,
            )
    except (KeyboardInterrupt, _Interrupted):  # before typer makes exit code 1 of it
        raise _Interrupted(resume_hint(sys.argv, inputs=inputs, output=output, started=started)) from None
    except (WorkerError, OutputError, TooManyErrors) as error:
        hint = resume_hint(sys.argv, inputs=inputs, output=output, started=started)
        raise reworded(error, f"{error}\n{hint}") from error
    except OutputClosed:
        raise _OutputGone from None
    _say(format_summary(summary))
    raise typer.Exit(1 if summary.rows_failed else 0)


@app.command(
    help="""Measure how fast a model runs here, where the time goes, and how far it is from what the device can do.

    The default workload is nano-vllm's: 256 requests, prompts and answers of 100 to 1024 tokens, temperature 0.6.
    With --input it is the rows of a file. Answers always have the length that was asked for: nothing ends them early.

    \b
    Examples:
      nvcli bench --model demo --num-requests 32
      nvcli bench --shape qwen3-0.6b --repeat 3 --plot run.svg
      nvcli bench --shape qwen3-8b --tp 2 --json > result.json
      nvcli bench --shape qwen3-0.6b --shared-prefix 2048 --input-len 64 --output-len 128
      nvcli bench --shape qwen3-8b --ablate overlap,graphs,prefix-cache,backend=torch
      nvcli bench -m Qwen/Qwen3-8B --input questions.jsonl --num-requests 500
    """,
)
def bench(
    model: ModelOption = None,
    shape: ShapeOption = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="Rows of a file, as `generate` takes them, instead of made-up ones."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", metavar="N", min=1, help="256; with --input the first N rows, else all."),
    ] = None,
    input_len: Annotated[
        str | None, typer.Option("--input-len", metavar="A:B", help="Prompt tokens, uniform; 100:1024.")
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len",
            metavar="A:B",
            help="Answer tokens, uniform; 100:1024. With --input: where rows say nothing.",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            "--shared-prefix", metavar="N", min=0, help="Tokens that all prompts begin with, beside their own."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0.6.")] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", min=0, help="Sample among the K likeliest tokens; 0: off.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="P", min=0.001, max=1.0, help="Sample among tokens of this probability; 1: off."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="What lengths and tokens follow from.")
    ] = 0,
    repeat: Annotated[
        int,
        typer.Option("--repeat", metavar="N", min=1, help="Passes over the workload, each with an empty prefix cache."),
    ] = 1,
    ablate: Annotated[
        str | None,
        typer.Option(
            "--ablate",
            metavar="PART,...",
            help="Run again without each: overlap, graphs, prefix-cache; or with another: backend=NAME.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw step times and KV use over the run: an .svg or .png file."),
    ] = None,
    config: ConfigOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    dp: DpOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    from nvcli.config import find_config_file, load_run_config

    flags = {"--model": model or shape, "--tp": _size(tp), "--pp": pp, "--dp": _size(dp)}
    run = load_run_config(find_config_file(config), overrides or (), flags)

    from nvcli.bench.command import BenchOptions, run_bench
    from nvcli.bench.report import format_json, format_result
    from nvcli.errors import WorkerError

    options = BenchOptions(
        shape=shape,
        input=input_file,
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        shared_prefix=shared_prefix,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        repeat=repeat,
        ablate=ablate,
        plot=plot,
    )
    try:
        result = run_bench(run, options, say=_say)
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(130) from None
    except WorkerError as error:
        _say_failure(error)
        raise typer.Exit(3) from None
    typer.echo(format_json(result) if as_json else format_result(result))


@app.command(
    name="profile-memory",
    help="""Show where the memory of each GPU goes, how many requests fit, and which settings would change that.

    Loads the model as a run would and runs its largest batches. With --dry-run nothing is loaded and no GPU is needed.

    \b
    Examples:
      nvcli profile-memory -m Qwen/Qwen3-8B --input questions.jsonl
      nvcli profile-memory -m Qwen/Qwen3-32B --dry-run --gpu-memory 80GiB --tp 4
      nvcli profile-memory --shape qwen3-8b --plot memory.svg
    """,
)
def profile_memory(
    model: ModelOption = None,
    shape: ShapeOption = None,
    input_file: Annotated[
        str | None, typer.Option("--input", metavar="FILE", help="Show how many of this file's requests fit.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan from the configuration alone: no GPU, nothing loaded.")
    ] = False,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Of each GPU, for --dry-run; such as 80GiB.")
    ] = None,
    config: ConfigOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    overrides: SetOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg|.png", help="Draw a bar for each rank.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    from nvcli.bench.plot import check_plot
    from nvcli.config import find_config_file, load_run_config
    from nvcli.profile.command import run_profile
    from nvcli.profile.picture import print_bars, write_plot
    from nvcli.profile.report import format_json, format_profile

    if plot is not None:
        check_plot(plot)
    flags = {"--model": model or shape, "--tp": _size(tp), "--pp": pp}
    run = load_run_config(find_config_file(config), overrides or (), flags)
    profile = run_profile(run, shape=shape, input_file=input_file, dry_run=dry_run, gpu_memory=gpu_memory, say=_say)
    if plot is not None:
        write_plot(profile, plot)
    if as_json:
        typer.echo(format_json(profile))
    else:
        print_bars(profile)
        typer.echo(format_profile(profile))
    raise typer.Exit(2 if profile.problem is not None else 0)


@app.command(
    epilog="Exit codes: 0 nothing found would stop a run; 1 something would; 2 usage or configuration.",
    help="""Find out whether this machine, and a model where one is named, are fit for a run.

    Looks at Python, torch, drivers and GPUs, attention backends, collectives between --tp processes, memory, limits,
    folders, and the model's files. Every warning and problem says what to do. Downloads nothing.

    \b
    Examples:
      nvcli doctor
      nvcli doctor --model Qwen/Qwen3-8B --tp 2
      nvcli doctor -c configs/h200-qwen3-8b.yaml -o /data/answers.jsonl
      nvcli doctor --device cpu --tp 2 --json | jq '.findings[] | select(.level == "problem")'
    """,
)
def doctor(
    model: ModelOption = None,
    tp: Annotated[
        str | None,
        typer.Option("--tp", metavar="N|auto", help="GPUs (processes) for each copy: their all-reduce is tried."),
    ] = None,
    pp: PpOption = None,
    dp: DpOption = None,
    device: Annotated[
        DeviceChoice | None, typer.Option("--device", help="What the run would be on. Without it: what is there.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where answers would go: its folder is looked at."),
    ] = Path("answers.jsonl"),
    config: ConfigOption = None,
    overrides: SetOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="How long a check may take.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, on standard output.")] = False,
) -> None:
    from nvcli.config import find_config_file, load_run_config
    from nvcli.doctor.examination import examine
    from nvcli.doctor.findings import Level, count
    from nvcli.doctor.report import format_json, format_verdict, print_section

    flags = {
        "--model": model,
        "--tp": _size(tp),
        "--pp": pp,
        "--dp": _size(dp),
        "--device": device.value if device else None,
    }
    run = load_run_config(find_config_file(config), overrides or (), flags, needs_model=False)
    sections = []
    for section in examine(run, output=output.absolute().parent, timeout=timeout):
        sections.append(section)
        if not as_json:
            print_section(section, sys.stdout)
    typer.echo(format_json(sections) if as_json else format_verdict(sections))
    raise typer.Exit(1 if count(sections, Level.PROBLEM) else 0)


class _Interrupted(BaseException):
    """No error, as KeyboardInterrupt is none: what it passes through must not keep it, nor tell of a failure."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted("the same command goes on")


class _OutputGone(Exception):
    pass


def _size(text: str | None) -> int | str | None:
    """A number where it is one; the configuration says what else is allowed."""
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def _say(text: str) -> None:
    typer.echo(f"nvcli: {text}", err=True)


def _say_failure(error: NvcliError) -> None:
    """One line; a traceback that nobody has kept goes into a file which the line names."""
    from nvcli.pipeline.traceback_file import keep_traceback

    _say(f"error: {keep_traceback(error)}")


def _leave(code: int) -> None:
    """End the process, without waiting for a background thread that reads or imports and cannot be told to stop."""
    if threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
