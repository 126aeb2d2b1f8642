"""The command line: parses, calls, prints, and turns errors into exit codes. No logic.

Only typer is imported at the top, so that help and errors of configuration come at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nvcli import __version__

EXIT_CODES = """Exit codes: 0 every row was answered; 1 some rows carry errors; 2 usage, configuration or model;
3 the engine failed; 130 interrupted."""

app = typer.Typer(
    name="nvcli",
    help="Offline LLM generation on one machine: a JSONL file in, a JSONL file out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class OrderChoice(StrEnum):
    INPUT = "input"
    COMPLETION = "completion"


class ProgressChoice(StrEnum):
    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    NONE = "none"


def main() -> None:
    """The `nvcli` command."""
    from nvcli.errors import NvcliError, WorkerError

    try:
        app()  # ends with SystemExit, its own usage errors included (2)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except _Interrupted:
        _say("interrupted; the rows answered so far are in the output; start anew with --overwrite")
        code = 130
    except _OutputGone:
        code = 141  # as a command that SIGPIPE ends
    except WorkerError as error:
        _say(f"error: {error}\nthe rows answered so far are in the output; run the same command with --overwrite")
        code = 3
    except NvcliError as error:
        _say(f"error: {error}")
        code = 2
    except Exception:
        import traceback

        traceback.print_exc()
        _say("this is a bug in nvcli; please report it with the lines above")
        code = 3
    _leave(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nvcli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    epilog=EXIT_CODES,
    help="""Answer every row of INPUT with the model, into one output file.

    INPUT is JSONL: a row has `prompt`, `messages` or `prompt_token_ids`, and may have `id` and `sampling`; its other
    keys are passed through. `-` is standard input, and files may be .gz.

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
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="YAML file. Without it ./nvcli.yaml, if there is one."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="PATH|NAME", help="Folder, Hugging Face id, or `demo`.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="GPUs (processes) for each copy.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Copies of the model.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start an existing output anew.")] = False,
    order: Annotated[OrderChoice | None, typer.Option("--order", help="Order of the output's rows.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows.")] = None,
    progress: Annotated[ProgressChoice, typer.Option("--progress", help="How to show progress.")] = ProgressChoice.AUTO,
) -> None:
    from nvcli.config import find_config_file, load_run_config

    config_file = find_config_file(config)
    flags = {"--model": model, "--tp": tp, "--dp": dp, "--order": order.value if order else None}
    run = load_run_config(config_file, overrides or (), flags)

    from nvcli.jobs.writer import OutputClosed
    from nvcli.pipeline.generate import generate as run_job
    from nvcli.pipeline.progress import make_progress
    from nvcli.pipeline.summary import format_summary

    shown = make_progress(progress.value, sys.stderr)
    if config is None and config_file is not None:
        shown.note(f"using the configuration in {config_file}; --config names another")
    try:
        summary = run_job(run, inputs=inputs, output=output, progress=shown, overwrite=overwrite, limit=limit)
    except KeyboardInterrupt:
        raise _Interrupted from None  # before typer makes exit code 1 of it
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
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="PATH|NAME", help="Folder, Hugging Face id, or `demo`.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help="Made-up weights of a known shape, such as qwen3-0.6b; no files."),
    ] = None,
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
    seed: Annotated[int, typer.Option("--seed", min=0, help="What lengths and tokens follow from.")] = 0,
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
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="YAML file. Without it ./nvcli.yaml, if there is one."),
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="GPUs (processes) for each copy.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Copies of the model.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON, on standard output.")] = False,
) -> None:
    from nvcli.config import find_config_file, load_run_config

    flags = {"--model": model or shape, "--tp": tp, "--dp": dp}
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
        _say(f"error: {error}")
        raise typer.Exit(3) from None
    typer.echo(format_json(result) if as_json else format_result(result))


class _Interrupted(Exception):
    pass


class _OutputGone(Exception):
    pass


def _say(text: str) -> None:
    typer.echo(f"nvcli: {text}", err=True)


def _leave(code: int) -> None:
    """End the process, without waiting for a background thread that reads or imports and cannot be told to stop."""
    if threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
