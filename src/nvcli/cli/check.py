"""`nvcli check`: says what a job will do with its rows, before it takes hours. `generate --dry-run` says the same."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from msgspec import Meta

from nvcli.cli import completion
from nvcli.cli.check_report import run_check
from nvcli.cli.help import MODEL, RESULT, WORKLOAD
from nvcli.cli.job_options import job_flags, with_job_options
from nvcli.cli.messages import choose_config_file
from nvcli.cli.options import ConfigOption, JsonOption, LimitOption, NumRows, SetOption, ShardOption
from nvcli.cli.values import optional_value

_NumPrompts = Annotated[int, Meta(ge=0, le=1000)]
_NumTokens = Annotated[int, Meta(ge=1)]
_NumGpus = Annotated[int, Meta(ge=1, le=1024)]


@with_job_options
def check(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Input files, or - for standard input.")],
    limit: LimitOption = None,
    shard: ShardOption = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="N", help="How many prompts to show [default: 3]", rich_help_panel=RESULT),
    ] = None,
    as_json: JsonOption = False,
    answer_tokens: Annotated[
        str | None,
        typer.Option(
            "--answer-tokens",
            metavar="N",
            help="Expected tokens of an answer, for the estimate [default: 256]",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="KIND",
            help="Estimate for GPUs of this kind, such as h200 [default: those that are here]",
            autocompletion=completion.gpus,
            rich_help_panel=MODEL,
        ),
    ] = None,
    num_gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="N", help="How many GPUs of that kind [default: 1]", rich_help_panel=MODEL),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    **options: Any,
) -> None:
    """Say what a job will do with the rows of INPUT, before it takes hours: no GPU is used, no weights are read.

    Reads and tokenizes all rows as `generate` does, and takes its options. Shows the first prompts as the model will
    see them, rows with errors, lengths, equal rows and shared beginnings, the sampling in effect, tokens and time.

    \b
    Examples:
      nvcli check questions.jsonl -m Qwen/Qwen3-8B
      nvcli check 'data/*.jsonl' -m Qwen/Qwen3-32B --gpu h200 --gpus 4 --answer-tokens 800
      nvcli check questions.jsonl -m demo --max-tokens 64 --json | jq .errors
    """
    from nvcli.check.check import CheckOptions
    from nvcli.check.machine import named_gpus
    from nvcli.config import load_sourced_config
    from nvcli.jobs.shard import choose_shard

    check_options = CheckOptions(
        limit=optional_value("--limit", limit, NumRows, int),
        shard=None if shard is None else choose_shard(shard, os.environ),
        num_prompts=_or_default(optional_value("--prompts", prompts, _NumPrompts, int), 3),
        answer_tokens=optional_value("--answer-tokens", answer_tokens, _NumTokens, int),
        gpus=named_gpus(gpu, optional_value("--gpus", num_gpus, _NumGpus, int)),
    )
    run, source = load_sourced_config(choose_config_file(config), overrides or (), job_flags(options))
    run_check(run, source, inputs=inputs, options=check_options, as_json=as_json)


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
