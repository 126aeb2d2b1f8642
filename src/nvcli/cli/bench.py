"""`nvcli bench`: measures how fast a model runs here."""

from __future__ import annotations

import typer

from nvcli.cli.messages import say
from nvcli.cli.options import AsJson, Settings, keys_of, with_options
from nvcli.tools.bench.options import BenchOptions


@with_options(*keys_of("", "speculation", without=("device", "seed")))
def bench(*, settings: Settings, options: BenchOptions, as_json: AsJson = False) -> None:
    """Measure how fast a model runs here, where the time goes, and how close it comes to the device's limits.

    The default workload is nano-vllm's: 256 requests, prompts and answers of 100 to 1024 tokens, temperature 0.6.
    With --input it is the rows of a file. Answers always have the requested length: nothing ends them early.

    \b
    Examples:
      nvcli bench --model demo --num-requests 32
      nvcli bench --shape qwen3-0.6b --repeat 3 --plot run.svg
      nvcli bench --shape qwen3-8b --tp 2 --json > result.json
      nvcli bench --shape qwen3-0.6b --shared-prefix 2048 --input-len 64 --output-len 128
      nvcli bench --shape qwen3-8b --num-requests 1024 --shared-prefix 1024,1024:8 --input-len 64 --output-len 128
      nvcli bench --shape qwen3-8b --num-requests 128 --samples 64 --input-len 200 --output-len 512
      nvcli bench --shape qwen3-8b --ablate overlap,graphs,prefix-cache,backend=torch
      nvcli bench --shape qwen3-8b --lora-rank 16 --num-loras 8
      nvcli bench -m Qwen/Qwen3-8B --input questions.jsonl --num-requests 500
    """
    run = settings.load(shape=options.shape)

    from nvcli.tools.bench.command import plot_result, run_bench
    from nvcli.tools.bench.report import format_json, format_result

    result = run_bench(run, options, say=say)
    typer.echo(format_json(result) if as_json else format_result(result))
    if options.plot is not None:
        plot_result(result, options.plot)
        say(f"step times and KV use are plotted in {options.plot}")
