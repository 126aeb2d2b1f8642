"""`nvcli check`: reports what a job will do with its rows, before it takes hours. `generate --dry-run` does the
same."""

from __future__ import annotations

import os
from typing import Annotated

from msgspec import Meta

from nvcli.cli.check_report import run_check
from nvcli.cli.options import INPUT, AsJson, Limit, Settings, ShardName, keys_of, with_options
from nvcli.core.config_types import PositiveInt
from nvcli.core.flags import MODEL, RESULT, WORKLOAD, Flag


@with_options(*keys_of("", "speculation", "job", "sampling", without=("device",)))
def check(
    inputs: Annotated[list[str], INPUT],
    *,
    limit: Limit = None,
    shard: ShardName = None,
    settings: Settings,
    prompts: Annotated[int, Meta(ge=0, le=1000), Flag("--prompts", RESULT, "Number of prompts to show.")] = 3,
    as_json: AsJson = False,
    answer_tokens: Annotated[
        PositiveInt | None,
        Flag("--answer-tokens", WORKLOAD, "Expected tokens per answer, for the estimate [default: 256]"),
    ] = None,
    gpu: Annotated[
        str | None,
        Flag(
            *(
                "--gpu",
                MODEL,
                "Estimate for GPUs of this kind, such as h200 [default: the GPUs of this machine]",
                "KIND",
            ),
            completes="gpus",
        ),
    ] = None,
    num_gpus: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Flag("--gpus", MODEL, "Number of GPUs of that kind [default: 1]")
    ] = None,
) -> None:
    """Report what a job will do with the rows of INPUT, before it takes hours. Uses no GPU and reads no weights.

    Reads and tokenizes all rows as `generate` does, and takes its options. Shows the first prompts as the model will
    see them, rows with errors, lengths, equal rows and shared beginnings, the sampling in effect, tokens and time.

    \b
    Examples:
      nvcli check questions.jsonl -m Qwen/Qwen3-8B
      nvcli check 'data/*.jsonl' -m Qwen/Qwen3-32B --gpu h200 --gpus 4 --answer-tokens 800
      nvcli check questions.jsonl -m demo --max-tokens 64 --json | jq .errors
    """
    from nvcli.job.shard import choose_shard
    from nvcli.tools.check.check import CheckOptions
    from nvcli.tools.check.machine import named_gpus

    options = CheckOptions(
        limit=limit,
        shard=None if shard is None else choose_shard(shard, os.environ),
        num_prompts=prompts,
        answer_tokens=answer_tokens,
        gpus=named_gpus(gpu, num_gpus),
    )
    run, source = settings.load_sourced()
    run_check(run, source, inputs=inputs, options=options, as_json=as_json)
