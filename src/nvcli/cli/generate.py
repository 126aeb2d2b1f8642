"""`nvcli generate`: answers the rows of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from nvcli.cli import completion
from nvcli.cli.answer_files import JobFiles, ProgressName, ShownProgress, answer_files
from nvcli.cli.help import MODEL, OTHER, PROMPTS, ROWS
from nvcli.cli.key_flags import key_flags
from nvcli.cli.messages import choose_config_file
from nvcli.cli.options import (
    ConfigOption,
    DpOption,
    DtypeOption,
    EpOption,
    GpuMemoryUtilizationOption,
    HfOverridesOption,
    LimitOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelOption,
    NumRows,
    PpOption,
    QuantizationOption,
    RevisionOption,
    SetOption,
    ShardOption,
    TpOption,
)
from nvcli.cli.prompt import answer_prompts, check_prompt_options
from nvcli.cli.sampling_options import (
    ChatOption,
    ChatTemplateKwargsOption,
    ChatTemplateOption,
    FrequencyPenaltyOption,
    IgnoreEosOption,
    LogprobsOption,
    MaxTokensOption,
    MinPOption,
    NOption,
    PresencePenaltyOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from nvcli.cli.values import option_value, optional_value

if TYPE_CHECKING:
    from nvcli.job_run.progress.display import Verbosity


def generate(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files, folders, datasets or URLs; - is standard input."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="In place of INPUT: print the answer to TEXT; may be repeated.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="With -p: continue TEXT as it is, without the chat template.", rich_help_panel=PROMPTS
        ),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file, FOLDER/ for one of each input, or - [default: x.jsonl → x.out.jsonl, - → -]",
            rich_help_panel=ROWS,
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="input|completion",
            help="Order of the output's rows.",
            autocompletion=completion.words("input", "completion"),
            rich_help_panel=ROWS,
        ),
    ] = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    id_field: Annotated[
        str | None,
        typer.Option("--id-field", metavar="COLUMN", help="Key (column) of the ids.", rich_help_panel=ROWS),
    ] = None,
    keep_input: Annotated[
        bool,
        typer.Option("--keep-input", help="Copy the prompt and all else of a row to the output.", rich_help_panel=ROWS),
    ] = False,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="COLUMN",
            help="Key (column) for the answer's text alone [default: none; CSV: generated_text]",
            rich_help_panel=ROWS,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start an existing output anew.", rich_help_panel=ROWS)
    ] = False,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Answer the failed rows of an existing output again.", rich_help_panel=ROWS
        ),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Answer what has changed in INPUT, and keep the other answers of an existing output.",
            rich_help_panel=ROWS,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what the job would do, as `nvcli check` does: nothing is written.",
            rich_help_panel=ROWS,
        ),
    ] = False,
    max_errors: Annotated[
        str | None,
        typer.Option("--max-errors", metavar="N", help="Stop once more than N rows have failed.", rich_help_panel=ROWS),
    ] = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
    hf_overrides: HfOverridesOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    tp: TpOption = None,
    ep: EpOption = False,
    pp: PpOption = None,
    dp: DpOption = None,
    chat: ChatOption = None,
    system: SystemOption = None,
    prompt_field: Annotated[
        str | None,
        typer.Option("--prompt-field", metavar="COLUMN", help="Key (column) of the prompts.", rich_help_panel=PROMPTS),
    ] = None,
    messages_field: Annotated[
        str | None,
        typer.Option(
            "--messages-field",
            metavar="COLUMN",
            help="Key (column) of the conversations.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            "--prompt-template",
            metavar="TEXT",
            help="Prompts made of columns, such as 'Translate: {text}'.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat_template: ChatTemplateOption = None,
    chat_template_kwargs: ChatTemplateKwargsOption = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="When a copy of the model dies, the others take over its rows.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    n: NOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    logprobs: LogprobsOption = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    progress: Annotated[
        str,
        typer.Option(
            "--progress",
            metavar="auto|bar|plain|none",
            help="How to show progress.",
            autocompletion=completion.words("auto", "bar", "plain", "none"),
            rich_help_panel=OTHER,
        ),
    ] = "auto",
    progress_file: Annotated[
        Path | None,
        typer.Option(
            "--progress-file",
            metavar="FILE",
            help="Keep progress as JSON in FILE, replaced every second.",
            rich_help_panel=OTHER,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write what the run did to FILE at its end: a page (.html) or JSON (.json).",
            rich_help_panel=OTHER,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show how the run works: start-up, caches, times.", rich_help_panel=OTHER),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show nothing but warnings and errors.", rich_help_panel=OTHER)
    ] = False,
) -> None:
    """Answer every row of INPUT with the model, into one output file, or one for each input.

    INPUT is JSONL: a row has `prompt`, `messages` or `prompt_token_ids`, and may have `id`, `sampling` and
    `chat_template_kwargs`; its other keys are passed through. Rows of OpenAI batch files are answered in OpenAI's
    form. By the end of its name it may also be a JSON array (.json), CSV or TSV, plain text with a prompt on each line
    (.txt), Parquet, or Arrow; all but the last two may have .gz or .zst behind it. `-` is standard input, a quoted
    pattern names many files, a folder is a dataset on disk, hf://OWNER/NAME/CONFIG:SPLIT one on the Hugging Face hub,
    and https://, s3:// and gs:// name remote files. The output is JSONL, CSV, TSV or Parquet, by its name.

    An output that is there is continued: the same command finishes a job that was cut short. With --update it
    follows an INPUT with mended, new or removed rows.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli generate -p 'What is 3+4?' -m demo
      nvcli generate questions.jsonl -m Qwen/Qwen3-8B --tp 2 -o answers.jsonl
      nvcli generate questions.jsonl -m demo --temperature 0 --max-tokens 256 --stop Question:
      nvcli generate a.jsonl b.jsonl.gz -c configs/demo.yaml -o out.jsonl --set job.order=input
      cat questions.jsonl | nvcli generate - -m demo | jq '.choices[0].text'
    """
    given = dict(locals())  # the options by name
    from nvcli.config import load_sourced_config
    from nvcli.jobs.shard import choose_shard
    from nvcli.process_limits import check_process

    check_process()
    inputs = inputs or []
    check_prompt_options(
        inputs,
        prompts or [],
        raw=raw,
        for_files={
            "--output": output,
            "--order": order,
            "--limit": limit,
            "--shard": shard,
            "--dry-run": dry_run,
            "--id-field": id_field,
            "--keep-input": keep_input,
            "--text-field": text_field,
            "--prompt-field": prompt_field,
            "--messages-field": messages_field,
            "--overwrite": overwrite,
            "--retry-errors": retry_errors,
            "--max-errors": max_errors,
            "--prompt-template": prompt_template,
            "--keep-going": keep_going,
            "--progress-file": progress_file,
            "--report": report,
        },
        for_chats={
            "--chat": chat,
            "--system": system,
            "--chat-template": chat_template,
            "--chat-template-kwargs": chat_template_kwargs,
        },
    )
    config_file = choose_config_file(config)
    progress_name = cast(ProgressName, option_value("--progress", progress, ProgressName, str))
    num_rows = optional_value("--limit", limit, NumRows, int)
    part = None if shard is None else choose_shard(shard, os.environ)
    flags = key_flags(generate, given)
    run, source = load_sourced_config(config_file, overrides or (), flags)
    if dry_run:
        from nvcli.check.check import CheckOptions
        from nvcli.cli.check_report import run_check

        run_check(run, source, inputs=inputs, output=output, options=CheckOptions(limit=num_rows, shard=part))
    if prompts:
        raise typer.Exit(answer_prompts(run, prompts, raw=raw))

    notes = []
    if shard is not None and part is not None and shard != str(part):
        notes.append(f"answering shard {part}, as Slurm counts its tasks")
    files = JobFiles(
        inputs=inputs,
        output=output,
        overwrite=overwrite,
        retry_errors=retry_errors,
        update=update,
        limit=num_rows,
        shard=part,
    )
    showing = ShownProgress(
        name=progress_name,
        verbosity=chosen_verbosity(verbose=verbose, quiet=quiet),
        progress_file=progress_file,
        report=report,
        notes=notes,
    )
    raise typer.Exit(answer_files(run, source, files, showing))


def chosen_verbosity(*, verbose: bool, quiet: bool) -> Verbosity:
    """Return how much is shown. Raises ConfigError where both flags are given."""
    from nvcli.errors import ConfigError

    if verbose and quiet:
        raise ConfigError("--verbose and --quiet exclude each other; leave one out")
    return "quiet" if quiet else "verbose" if verbose else "normal"
