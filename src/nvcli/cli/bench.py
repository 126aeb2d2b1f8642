"""`nvcli bench`: measures how fast a model runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli.help import RESULT, WORKLOAD
from nvcli.cli.key_flags import key_flags
from nvcli.cli.messages import choose_config_file, say, say_failure
from nvcli.cli.options import (
    ConfigOption,
    DpOption,
    DtypeOption,
    EpOption,
    GpuMemoryUtilizationOption,
    HfOverridesOption,
    JsonOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelOption,
    PpOption,
    QuantizationOption,
    RevisionOption,
    SetOption,
    ShapeOption,
    TpOption,
    model_or_shape,
)
from nvcli.cli.values import option_value, optional_value

_NumRequests = Annotated[int, Meta(ge=1, le=10_000_000)]
_NumSamples = Annotated[int, Meta(ge=1, le=1024)]
_Temperature = Annotated[float, Meta(ge=0, le=100)]
_TopK = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_TopP = Annotated[float, Meta(gt=0, le=1)]
_Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_NumPasses = Annotated[int, Meta(ge=1)]


def bench(
    model: ModelOption = None,
    revision: RevisionOption = None,
    hf_overrides: HfOverridesOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    tp: TpOption = None,
    ep: EpOption = False,
    pp: PpOption = None,
    dp: DpOption = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="Rows of a file, as `generate` takes them, instead of made-up ones.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    num_requests: Annotated[
        str | None,
        typer.Option(
            "--num-requests",
            metavar="N",
            help="Number of requests; with --input the first N rows [default: 256; with --input all]",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len", metavar="A:B", help="Prompt tokens, uniform [default: 100:1024]", rich_help_panel=WORKLOAD
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len",
            metavar="A:B",
            help="Answer tokens, uniform; with --input for rows that do not say [default: 100:1024]",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    shared_prefix: Annotated[
        str | None,
        typer.Option(
            "--shared-prefix",
            metavar="N[:GROUPS],...",
            help="Tokens that prompts share, before their own: all, or those of a group; a comma adds a level.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option("--samples", metavar="N", help="Answers to each prompt [default: 1]", rich_help_panel=WORKLOAD),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            "--temperature", metavar="T", help="Sampling temperature [default: 0.6]", rich_help_panel=WORKLOAD
        ),
    ] = None,
    top_k: Annotated[
        str | None,
        typer.Option(
            "--top-k",
            metavar="K",
            help="Sample among the K likeliest tokens; 0: off [default: 0]",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    top_p: Annotated[
        str | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Sample among tokens of this probability; 1: off [default: 1]",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[
        str,
        typer.Option("--seed", metavar="N", help="Seed of the made-up lengths and tokens.", rich_help_panel=WORKLOAD),
    ] = "0",
    repeat: Annotated[
        str,
        typer.Option(
            "--repeat",
            metavar="N",
            help="Passes over the workload, each with an empty prefix cache.",
            rich_help_panel=RESULT,
        ),
    ] = "1",
    ablate: Annotated[
        str | None,
        typer.Option(
            "--ablate",
            metavar="PART,...",
            help="Run again without each: overlap, graphs, prefix-cache, admission; or with another: backend=NAME.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw step times and KV use over the run: an .svg or .png file.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
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
      nvcli bench --shape qwen3-8b --num-requests 1024 --shared-prefix 1024,1024:8 --input-len 64 --output-len 128
      nvcli bench --shape qwen3-8b --num-requests 128 --samples 64 --input-len 200 --output-len 512
      nvcli bench --shape qwen3-8b --ablate overlap,graphs,prefix-cache,backend=torch
      nvcli bench -m Qwen/Qwen3-8B --input questions.jsonl --num-requests 500
    """
    given = dict(locals())  # the options by name
    from nvcli.config import load_run_config
    from nvcli.process_limits import check_process

    check_process()
    flags = key_flags(bench, given, leave_out=("--temperature", "--top-k", "--top-p", "--seed"))
    flags["--model"] = model_or_shape(model, shape)
    run = load_run_config(choose_config_file(config), overrides or (), flags)

    from nvcli.bench.command import BenchOptions, run_bench
    from nvcli.bench.report import format_json, format_result
    from nvcli.errors import ModelError, WorkerError

    options = BenchOptions(
        shape=shape,
        input=input_file,
        num_requests=optional_value("--num-requests", num_requests, _NumRequests, int),
        input_len=input_len,
        output_len=output_len,
        shared_prefix=shared_prefix,
        samples=optional_value("--samples", samples, _NumSamples, int),
        temperature=optional_value("--temperature", temperature, _Temperature, float),
        top_k=optional_value("--top-k", top_k, _TopK, int),
        top_p=optional_value("--top-p", top_p, _TopP, float),
        seed=option_value("--seed", seed, _Seed, int),
        repeat=option_value("--repeat", repeat, _NumPasses, int),
        ablate=ablate,
        plot=plot,
    )
    try:
        result = run_bench(run, options, say=say)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except (WorkerError, ModelError) as error:
        say_failure(error)
        raise typer.Exit(3) from None
    typer.echo(format_json(result) if as_json else format_result(result))
