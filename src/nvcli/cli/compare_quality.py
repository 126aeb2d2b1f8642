"""`nvcli compare-quality`: says how far the answers of one configuration are from those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli import completion
from nvcli.cli.help import MODEL, ROWS
from nvcli.cli.key_flags import key_flags
from nvcli.cli.messages import choose_config_file, say
from nvcli.cli.options import (
    ConfigOption,
    DtypeOption,
    GpuMemoryUtilizationOption,
    HfOverridesOption,
    JsonOption,
    MaxModelLenOption,
    ModelOption,
    NumRows,
    RevisionOption,
    SetOption,
    TpOption,
)
from nvcli.cli.values import option_value

_NumTokens = Annotated[int, Meta(ge=0, le=1_000_000)]
_Context = Annotated[int, Meta(ge=2, le=10_000_000)]


def compare_quality(
    input_file: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="Rows as `generate` takes them, or a text (*.txt, *.md)."),
    ],
    model: ModelOption = None,
    revision: RevisionOption = None,
    hf_overrides: HfOverridesOption = None,
    set_b: Annotated[
        list[str] | None,
        typer.Option(
            "--set-b",
            metavar="KEY=VALUE",
            help="A key of the configuration that is different in B; may be repeated.",
            autocompletion=completion.keys,
            rich_help_panel=MODEL,
        ),
    ] = None,
    config_b: Annotated[
        Path | None,
        typer.Option("--config-b", metavar="FILE", help="YAML file for B [default: A's]", rich_help_panel=MODEL),
    ] = None,
    dtype: DtypeOption = None,
    max_model_len: MaxModelLenOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    tp: TpOption = None,
    limit: Annotated[
        str, typer.Option("--limit", metavar="N", help="Only the first N rows or pieces.", rich_help_panel=ROWS)
    ] = "256",
    context: Annotated[
        str,
        typer.Option("--context", metavar="N", help="Tokens of each piece of a text.", rich_help_panel=ROWS),
    ] = "2048",
    answer_tokens: Annotated[
        str,
        typer.Option(
            "--answer-tokens", metavar="N", help="Maximum tokens of a greedy answer; 0: none.", rich_help_panel=ROWS
        ),
    ] = "64",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Compare two configurations: how far are the predictions and the greedy answers of B from those of A?

    A is what the options say; B is the same but for --set-b and --config-b.

    \b
    Examples:
      nvcli compare-quality questions.jsonl -m Qwen/Qwen3-8B --set-b kv_cache_dtype=fp8
      nvcli compare-quality book.txt -m Qwen/Qwen3-8B --set-b model=Qwen/Qwen3-8B-FP8
    """
    given = dict(locals())  # the options by name
    from nvcli.config import FLAG_KEYS, load_run_config
    from nvcli.config_file import find_config_file
    from nvcli.process_limits import check_process
    from nvcli.quality.compare import compare_quality as run_comparison
    from nvcli.quality.report import format_json, format_report

    check_process()
    flags = key_flags(compare_quality, given)
    file, own = choose_config_file(config), overrides or []
    file_b = file if config_b is None else find_config_file(config_b)
    run_a = load_run_config(file, own, flags)
    changed = {text.partition("=")[0].strip() for text in set_b or ()}
    flags_b = {flag: value for flag, value in flags.items() if FLAG_KEYS[flag] not in changed}
    run_b = load_run_config(file_b, own, flags_b, other_overrides={"--set-b": set_b or ()})
    report = run_comparison(
        run_a,
        run_b,
        input_file,
        limit=option_value("--limit", limit, NumRows, int),
        context=option_value("--context", context, _Context, int),
        max_answer_tokens=option_value("--answer-tokens", answer_tokens, _NumTokens, int),
        say=say,
    )
    typer.echo(format_json(report) if as_json else format_report(report))
