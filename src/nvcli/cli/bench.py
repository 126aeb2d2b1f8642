"""`nvcli bench`: measures how fast a model runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.messages import say, say_failure
from nvcli.cli.options import (
    ConfigOption,
    DpOption,
    JsonOption,
    ModelOption,
    PpOption,
    SetOption,
    ShapeOption,
    TpOption,
    parse_size,
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
        typer.Option(
            "--num-requests",
            metavar="N",
            min=1,
            max=10_000_000,
            help="Number of requests; 256. With --input: the first N rows, else all.",
        ),
    ] = None,
    input_len: Annotated[
        str | None, typer.Option("--input-len", metavar="A:B", help="Prompt tokens, uniform; 100:1024.")
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len",
            metavar="A:B",
            help="Answer tokens, uniform; 100:1024. With --input: for rows that say nothing.",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            "--shared-prefix", metavar="N", min=0, help="Tokens that all prompts begin with, before their own."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0.6.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", metavar="K", min=0, max=(1 << 31) - 1, help="Sample among the K likeliest tokens; 0: off."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="P", min=0.001, max=1.0, help="Sample among tokens of this probability; 1: off."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Seed of the made-up lengths and tokens.")
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
    """Measure how fast a model runs here, where the time goes, and how far it is from what the device can do.

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
    """
    from nvcli.config import find_config_file, load_run_config
    from nvcli.process_limits import check_process

    check_process()
    flags = {"--model": model or shape, "--tp": parse_size(tp), "--pp": pp, "--dp": parse_size(dp)}
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
        result = run_bench(run, options, say=say)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except WorkerError as error:
        say_failure(error)
        raise typer.Exit(3) from None
    typer.echo(format_json(result) if as_json else format_result(result))
