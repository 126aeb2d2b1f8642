"""Answers the rows of files, for `nvcli generate`: progress and notes while it runs, the summary, and what to do next.

All that makes the job end early becomes the message and the exit code that the user sees.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from nvcli.cli.messages import Interrupted, OutputGone, say

if TYPE_CHECKING:
    from nvcli.config import RunConfig
    from nvcli.config_source import ConfigSource
    from nvcli.job_run.engine_ahead import EngineAhead
    from nvcli.job_run.engines import EngineSet
    from nvcli.job_run.progress.display import Progress, Verbosity
    from nvcli.job_run.progress.summary import Summary
    from nvcli.job_run.report.build import ReportFile
    from nvcli.job_run.resolve import ResolvedJob
    from nvcli.jobs.shard import Shard

Error = TypeVar("Error", bound=BaseException)

ProgressName = Literal["auto", "bar", "plain", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The files of a job, and what is to be done with an output that is there."""

    inputs: Sequence[str]
    output: str | None
    """None: beside the input. A folder: there, an output for each input."""
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

    An output that is a folder has an output for each input, and is made if it is not there: these are jobs of their
    own, for which the model is loaded once. Raises what `job_run.generate` raises, with the command that continues the
    job where that helps, Interrupted and OutputGone.
    """
    from nvcli.job_run.engine_ahead import EngineAhead

    with contextlib.closing(EngineAhead()) as ahead:
        return _answer_files(run, source, files, showing, ahead)


def _answer_files(
    run: RunConfig, source: ConfigSource, files: JobFiles, showing: ShownProgress, ahead: EngineAhead
) -> int:
    from nvcli.errors import NvcliError
    from nvcli.job_run.engines import EngineSet
    from nvcli.job_run.resolve import resolve_job
    from nvcli.jobs.files import folder_made, split_outputs

    each = [
        replace(files, inputs=inputs, output=output)
        for inputs, output in split_outputs(files.inputs, files.output, files.shard)
    ]
    progress, reports = _open_displays(files, each, showing)
    for note in showing.notes:
        progress.note(note)
    summaries: list[Summary] = []
    with progress, folder_made(files.output), contextlib.ExitStack() as stack:
        if len(each) == 1:
            summary = _answer(run, source, each[0], showing, progress, reports[0], ahead)
            return 1 if summary.rows_failed else 0
        jobs = [  # so that what is wrong with a later one is known before the first one begins
            resolve_job(
                run,
                inputs=one.inputs,
                output=one.output,
                limit=one.limit,
                shard=one.shard,
                overwrite=one.overwrite,
                setter_of=source.setter,
            )
            for one in each
        ]
        engines = EngineSet(ahead.start_engine)
        stack.callback(engines.close)
        for number, (one, job, report) in enumerate(zip(each, jobs, reports, strict=True), 1):
            progress.note(f"input {number:,} of {len(each):,}: {one.inputs[0]} → {one.output}")
            try:
                summaries.append(_answer(run, source, one, showing, progress, report, ahead, engines=engines, job=job))
            except (NvcliError, Interrupted) as error:
                raise _with_place(error, each, number) from None
    rows, failed = sum(one.rows for one in summaries), sum(one.rows_failed for one in summaries)
    if showing.verbosity != "quiet":
        say(f"{len(each):,} inputs → {files.output}: {rows - failed:,} of {rows:,} rows answered")
    return 1 if failed else 0


def _with_place(error: Error, each: Sequence[JobFiles], number: int) -> Error:
    """Return an error that says too which of the jobs it ended, and what became of the others."""
    from nvcli.errors import reworded

    lines = f"{error}\nthis was input {number:,} of {len(each):,}, {each[number - 1].inputs[0]}"
    if number > 1:
        lines += "; those before it are answered"
    if number < len(each) and each[0].overwrite:
        lines += "; those behind it were not begun: name them with --overwrite to answer them anew"
    return reworded(error, lines)


def _answer(
    run: RunConfig,
    source: ConfigSource,
    files: JobFiles,
    showing: ShownProgress,
    progress: Progress,
    report: ReportFile | None,
    ahead: EngineAhead,
    *,
    engines: EngineSet | None = None,
    job: ResolvedJob | None = None,
) -> Summary:
    """Do one job, and say how it went. `engines` and `job` are those of `generate`: the job is one of several."""
    from nvcli.errors import HopelessJob, OutputError, TooManyErrors, WorkerError, reworded
    from nvcli.job_run.early_end import go_on_hint, next_steps, resume_hint
    from nvcli.job_run.generate import generate
    from nvcli.job_run.progress.summary import format_summary
    from nvcli.jobs.output.sink import OutputClosed

    begun = threading.Event()

    def hint() -> str:
        return resume_hint(
            sys.argv, inputs=files.inputs, output=files.output, has_begun=begun.is_set(), shard=files.shard
        )

    try:
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
            start=ahead.start_engine,
            engines=engines,
            job=job,
            on_begin=begun.set,
        )
    except (KeyboardInterrupt, Interrupted):  # before typer makes exit code 1 of it
        raise Interrupted(hint()) from None
    except (WorkerError, OutputError, TooManyErrors) as error:
        raise reworded(error, f"{error}\n{hint()}") from error
    except HopelessJob as error:
        raise reworded(error, f"{error}\n{go_on_hint(sys.argv)}") from error
    except OutputClosed:
        raise OutputGone from None
    steps = next_steps(sys.argv, output=summary.output, errors=summary.errors)
    if text := format_summary(summary, verbosity=showing.verbosity, next_steps=steps):
        say(f"{summary.output}: {text}" if job is not None and showing.verbosity == "quiet" else text)
    return summary


def _open_displays(
    files: JobFiles, each: Sequence[JobFiles], showing: ShownProgress
) -> tuple[Progress, list[ReportFile | None]]:
    """Open the display, with the progress file behind it, and a report for each job. Raises ConfigError.

    None of these files may be one that the jobs have.
    """
    from nvcli.job_run.progress.display import make_progress
    from nvcli.job_run.progress.status_file import SideFile, StatusFile
    from nvcli.job_run.report.build import ReportFile
    from nvcli.jobs.files import is_terminal, job_files

    beside_answers = is_terminal(files.output, files.inputs)
    progress: Progress = make_progress(
        showing.name, sys.stderr, beside_answers=beside_answers, verbosity=showing.verbosity
    )
    path = showing.report
    if showing.progress_file is None and path is None:
        return progress, [None] * len(each)
    taken = job_files(files.inputs, files.output, files.shard)
    if showing.progress_file is not None:
        status = SideFile("--progress-file", showing.progress_file, taken=taken)
        taken += status.names
        progress = StatusFile(status, progress)
    if path is None:
        return progress, [None] * len(each)
    names = [path]
    if len(each) > 1:  # report.html → report.a.out.jsonl.html
        names = [path.with_name(f"{path.stem}.{Path(str(one.output)).name}{path.suffix}") for one in each]
    return progress, [ReportFile(name, taken=taken) for name in names]
