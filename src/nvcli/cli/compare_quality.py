"""`nvcli compare-quality`: measures how far one configuration's answers are from another's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli.messages import say, say_warning
from nvcli.cli.options import AsJson, Settings, with_options
from nvcli.core.config_types import PositiveInt
from nvcli.core.flags import MODEL, ROWS, Flag


@with_options(
    *("model", "revision", "hf_overrides", "dtype", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size")
)
def compare_quality(
    input_file: Annotated[
        str, typer.Argument(metavar="INPUT", help="File of rows, as for `generate`, or a text (*.txt, *.md).")
    ],
    *,
    settings: Settings,
    set_b: Annotated[
        Sequence[str],
        Flag(
            *("--set-b", MODEL, "A key of the configuration that differs in B; may be repeated.", "KEY=VALUE"),
            completes="keys",
        ),
    ] = (),
    config_b: Annotated[Path | None, Flag("--config-b", MODEL, "YAML file for B [default: A's]")] = None,
    limit: Annotated[PositiveInt, Flag("--limit", ROWS, "Number of rows or pieces to read.")] = 256,
    context: Annotated[int, Meta(ge=2, le=10_000_000), Flag("--context", ROWS, "Tokens per piece of a text.")] = 2048,
    answer_tokens: Annotated[
        int, Meta(ge=0, le=1_000_000), Flag("--answer-tokens", ROWS, "Maximum tokens of a greedy answer; 0: none.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Measure how far the predictions and greedy answers of configuration B are from those of A.

    A is the configuration of the options; B is the same except for --set-b and --config-b.

    \b
    Examples:
      nvcli compare-quality questions.jsonl -m Qwen/Qwen3-8B --set-b kv_cache_dtype=fp8
      nvcli compare-quality book.txt -m Qwen/Qwen3-8B --set-b model=Qwen/Qwen3-8B-FP8
    """
    from nvcli.core.config import flag_keys, load_run_config
    from nvcli.core.config_file import find_config_file
    from nvcli.tools.quality.compare import compare_quality as run_comparison
    from nvcli.tools.quality.report import format_json, format_report

    run_a = settings.load()
    file_b = settings.file if config_b is None else find_config_file(config_b)
    changed = {text.partition("=")[0].strip() for text in set_b}
    flags_b = {flag: value for flag, value in settings.flags.items() if flag_keys()[flag] not in changed}
    run_b = load_run_config(file_b, settings.overrides, flags_b, other_overrides={"--set-b": set_b})
    report = run_comparison(
        run_a,
        run_b,
        os.path.expanduser(input_file),
        limit=limit,
        context=context,
        max_answer_tokens=answer_tokens,
        say=say,
        note=say_warning,
    )
    typer.echo(format_json(report) if as_json else format_report(report))
