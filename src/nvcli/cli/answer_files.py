"""Answers the rows of files, for `nvcli generate`: progress and notes while it runs, the summary, and what to do next.

All that makes the job end early becomes the message and the exit code that the user sees.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nvcli.cli.messages import Interrupted, OutputGone, say

if TYPE_CHECKING:
    from nvcli.config import RunConfig
    from nvcli.config_source import ConfigSource
    from nvcli.job_run.progress.display import Progress, Verbosity
    from nvcli.job_run.report.report_file import ReportFile
    from nvcli.jobs.shard import Shard

ProgressName = Literal["auto", "bar", "plain", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The files of a job, and what is to be done with an output that is there."""

    inputs: Sequence[str]
    output: str | None
    """None: beside the input."""
    overwrite: bool
    retry_errors: bool
    update: bool
    limit: int | None
    shard: Shard | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    """Where and how the user follows a job."""

    name: ProgressName
    verbosity: Verbosity
    progress_file: Path | None
    report: Path | None
    notes: Sequence[str]
    """What to tell the user before the job starts."""


def answer_files(run: RunConfig, source: ConfigSource, files: JobFiles, showing: ShownProgress) -> int:
    """Answer the rows and return the exit code. `source` knows who has set which key of `run`.

    Raises what `job_run.generate` raises, with the command that continues the job where that helps, Interrupted and
    OutputGone.
    """
    from nvcli.errors import OutputError, TooManyErrors, WorkerError, reworded
    from nvcli.job_run.early_end import next_steps, resume_hint
    from nvcli.job_run.generate import generate
    from nvcli.job_run.progress.summary import format_summary
    from nvcli.jobs.output.sink import OutputClosed

    begun = threading.Event()

    def hint() -> str:
        return resume_hint(
            sys.argv, inputs=files.inputs, output=files.output, has_begun=begun.is_set(), shard=files.shard
        )

    progress, report = _open_displays(files, showing)
    for note in showing.notes:
        progress.note(note)
    try:
        with progress:
            summary = generate(
                run,
                inputs=files.inputs,
                output=files.output,
                progress=progress,
                overwrite=files.overwrite,
                retry_errors=files.retry_errors,
                update=files.update,
                limit=files.limit,
                shard=files.shard,
                report=report,
                setter_of=source.setter,
                on_begin=begun.set,
            )
    except (KeyboardInterrupt, Interrupted):  # before typer makes exit code 1 of it
        raise Interrupted(hint()) from None
    except (WorkerError, OutputError, TooManyErrors) as error:
        raise reworded(error, f"{error}\n{hint()}") from error
    except OutputClosed:
        raise OutputGone from None
    steps = next_steps(sys.argv, output=summary.output, errors=summary.errors)
    if text := format_summary(summary, verbosity=showing.verbosity, next_steps=steps):
        say(text)
    return 1 if summary.rows_failed else 0


def _open_displays(files: JobFiles, showing: ShownProgress) -> tuple[Progress, ReportFile | None]:
    """Open the display, with the progress file behind it, and the report. Raises ConfigError.

    None of these files may be one that the job has.
    """
    from nvcli.job_run.progress.display import make_progress
    from nvcli.job_run.progress.side_file import SideFile
    from nvcli.job_run.progress.status_file import StatusFile
    from nvcli.job_run.report.report_file import ReportFile
    from nvcli.jobs.files import is_terminal, job_files

    beside_answers = is_terminal(files.output, files.inputs)
    progress: Progress = make_progress(
        showing.name, sys.stderr, beside_answers=beside_answers, verbosity=showing.verbosity
    )
    if showing.progress_file is None and showing.report is None:
        return progress, None
    taken = job_files(files.inputs, files.output, files.shard)
    if showing.progress_file is not None:
        status = SideFile("--progress-file", showing.progress_file, taken=taken)
        taken += status.names
        progress = StatusFile(status, progress)
    return progress, None if showing.report is None else ReportFile(showing.report, taken=taken)
