"""`nvcli generate`: answers the rows of files."""

from __future__ import annotations

import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.messages import Interrupted, OutputGone, say
from nvcli.cli.options import ConfigOption, DpOption, ModelOption, PpOption, SetOption, TpOption, parse_size


class OrderChoice(StrEnum):
    """The orders that an output's rows may have."""

    INPUT = "input"
    COMPLETION = "completion"


class ProgressChoice(StrEnum):
    """The ways in which progress may be shown."""

    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    NONE = "none"


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
    """Answer every row of INPUT with the model, into one output file.

    INPUT is JSONL: a row has `prompt`, `messages` or `prompt_token_ids`, and may have `id` and `sampling`; its other
    keys are passed through. Rows of OpenAI batch files are answered in OpenAI's form. `-` is standard input, a quoted
    pattern names many files; files may be .gz, .zst or .parquet, and so may the output.

    An output that is there is continued: the same command finishes a job that was cut short.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli generate questions.jsonl -m Qwen/Qwen3-8B --tp 2 -o answers.jsonl
      nvcli generate a.jsonl b.jsonl.gz -c configs/demo.yaml -o out.jsonl --set sampling.temperature=0
      cat questions.jsonl | nvcli generate - -m demo -o - --progress none | jq '.choices[0].text'
    """
    from nvcli.config import find_config_file, load_run_config
    from nvcli.process_limits import check_process

    check_process()
    config_file = find_config_file(config)
    flags = {
        "--model": model,
        "--tp": parse_size(tp),
        "--pp": pp,
        "--dp": parse_size(dp),
        "--order": order.value if order else None,
        "--max-errors": max_errors,
        "--keep-going": keep_going or None,
    }
    run = load_run_config(config_file, overrides or (), flags)

    from nvcli.errors import OutputError, TooManyErrors, WorkerError, reworded
    from nvcli.job_run.early_end import resume_hint
    from nvcli.job_run.generate import generate as run_job
    from nvcli.job_run.progress.display import make_progress
    from nvcli.job_run.progress.status_file import StatusFile
    from nvcli.job_run.progress.summary import format_summary
    from nvcli.jobs.files import is_terminal, job_files
    from nvcli.jobs.output.sink import OutputClosed

    begun = threading.Event()
    shown = make_progress(progress.value, sys.stderr, beside_answers=is_terminal(output, inputs))
    if progress_file is not None:
        shown = StatusFile(progress_file, shown, taken=job_files(inputs, output))
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
                on_begin=begun.set,
            )
    except (KeyboardInterrupt, Interrupted):  # before typer makes exit code 1 of it
        raise Interrupted(resume_hint(sys.argv, inputs=inputs, output=output, has_begun=begun.is_set())) from None
    except (WorkerError, OutputError, TooManyErrors) as error:
        hint = resume_hint(sys.argv, inputs=inputs, output=output, has_begun=begun.is_set())
        raise reworded(error, f"{error}\n{hint}") from error
    except OutputClosed:
        raise OutputGone from None
    say(format_summary(summary))
    raise typer.Exit(1 if summary.rows_failed else 0)
