"""Answers the rows of files, for `generate`, `score`, `embed` and `classify`: their options, progress and notes, and
the summary.

Whatever ends the job early becomes the message and the exit code that the user sees.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import typer

from nvcli.cli.messages import Interrupted, say
from nvcli.cli.options import Limit, Overwrite, Settings, ShardName
from nvcli.core.flags import OTHER, ROWS, Flag
from nvcli.core.system.standard_streams import OutputGone
from nvcli.core.task_config import Task
from nvcli.errors import ConfigError, InputChanged, NvcliError, UnreadableInput, reworded

if TYPE_CHECKING:
    from nvcli.core.config import RunConfig
    from nvcli.core.config_source import ConfigSource
    from nvcli.job.progress.display import Progress, Verbosity
    from nvcli.job.progress.summary import Summary
    from nvcli.job.report.build import ReportFile
    from nvcli.job.run.engine_ahead import EngineAhead
    from nvcli.job.run.engines import EngineSet
    from nvcli.job.run.resolve import ResolvedJob
    from nvcli.job.shard import Shard

Error = TypeVar("Error", bound=BaseException)

ProgressName = Literal["auto", "bar", "plain", "none"]


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a job, apart from its inputs and its configuration."""

    output: Annotated[
        str | None,
        Flag(
            "--output -o",
            ROWS,
            "Output file, FOLDER/ for one per input, or - [default: x.jsonl → x.out.jsonl, - → -]",
            "FILE",
        ),
    ] = None
    limit: Limit = None
    shard: ShardName = None
    overwrite: Overwrite = False
    retry_errors: Annotated[
        bool, Flag("--retry-errors", ROWS, "Answer the failed rows of an existing output again.")
    ] = False
    update: Annotated[
        bool,
        Flag(
            "--update", ROWS, "Answer only what has changed in INPUT, and keep all other answers of an existing output."
        ),
    ] = False
    dry_run: Annotated[
        bool, Flag("--dry-run", ROWS, "Only say what the job would do, as `nvcli check` does: nothing is written.")
    ] = False
    progress: Annotated[ProgressName, Flag("--progress", OTHER, "How to show progress.")] = "auto"
    progress_file: Annotated[
        Path | None, Flag("--progress-file", OTHER, "Write progress as JSON to FILE, replaced every second.")
    ] = None
    report: Annotated[
        Path | None,
        Flag("--report", OTHER, "Write a report of the run to FILE at its end: a page (.html) or JSON (.json)."),
    ] = None
    verbose: Annotated[bool, Flag("--verbose -v", OTHER, "Show how the run works: start-up, caches, times.")] = False
    quiet: Annotated[bool, Flag("--quiet -q", OTHER, "Show nothing but warnings and errors.")] = False

    @property
    def verbosity(self) -> Verbosity:
        """How much is shown. Raises ConfigError if both switches are given."""
        if self.verbose and self.quiet:
            raise ConfigError("--verbose and --quiet exclude each other; leave one out")
        return "quiet" if self.quiet else "verbose" if self.verbose else "normal"


def run_job(inputs: Sequence[str], options: JobOptions, settings: Settings, task: Task | None = None) -> None:
    """Do the job of a command, or report what it would do (`--dry-run`), and exit with its code.

    A folder as output gets an output for each input, and is created if missing: these are jobs of their own, for which
    the model is loaded once. `task` overrides the configuration's. Raises what `job.run.generate` raises, with the
    command that continues the job if there is one, Interrupted and OutputGone.
    """
    from nvcli.job.shard import choose_shard

    shard = None if options.shard is None else choose_shard(options.shard, os.environ)
    run, source = settings.load_sourced(task=task)
    if options.dry_run:
        from nvcli.cli.check_report import run_check
        from nvcli.tools.check.check import CheckOptions

        check = CheckOptions(limit=options.limit, shard=shard)
        run_check(run, source, inputs=inputs, output=options.output, options=check)
    from nvcli.job.run.engine_ahead import EngineAhead

    verbosity = options.verbosity
    with contextlib.closing(EngineAhead()) as ahead:
        jobs = _Jobs(run=run, source=source, options=options, shard=shard, verbosity=verbosity, ahead=ahead)
        raise typer.Exit(jobs.answer(inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
    """The jobs of one command, which share its configuration and its options."""

    run: RunConfig
    source: ConfigSource
    """Knows the origin of each key of `run`."""
    options: JobOptions
    shard: Shard | None
    verbosity: Verbosity
    ahead: EngineAhead

    def answer(self, inputs: Sequence[str]) -> int:
        """Answer the rows and return the exit code. Raises the error of a job that its files end once the others are
        done."""
        from nvcli.job.files import folder_made, split_outputs
        from nvcli.job.run.engines import EngineSet

        each = split_outputs(inputs, self.options.output, self.shard)
        progress, reports = self._open_displays(inputs, each)
        if self.shard is not None and self.options.shard != str(self.shard):
            progress.note(f"answering shard {self.shard}, as Slurm counts its tasks")
        summaries: list[Summary] = []
        with progress, folder_made(self.options.output), contextlib.ExitStack() as stack:
            if len(each) == 1:
                return 1 if self._answer(*each[0], progress, reports[0]).rows_failed else 0
            jobs = self._resolve_all(each)  # errors of later ones come before the first one begins
            engines = EngineSet(self.ahead.start_engine)
            stack.callback(engines.close)
            broken: list[ConfigError | InputChanged] = []
            for number, ((some, output), job, report) in enumerate(zip(each, jobs, reports, strict=True), 1):
                progress.note(f"input {number:,} of {len(each):,}: {some[0]} → {output}")
                try:
                    summaries.append(self._answer(some, output, progress, report, engines=engines, job=job))
                except (NvcliError, Interrupted) as error:
                    # Once a job is done, a ConfigError concerns one job alone, as that of another job's output does.
                    is_of_files = isinstance(error, UnreadableInput | InputChanged)
                    if isinstance(error, ConfigError | InputChanged) and (is_of_files or summaries):
                        progress.warn(str(error))
                        broken.append(error)
                        continue
                    names = [inputs[0] for inputs, _ in each]
                    raise _with_place(error, names, number, was_overwritten=self.options.overwrite) from None
        rows, failed = sum(one.rows for one in summaries), sum(one.rows_failed for one in summaries)
        if self.verbosity != "quiet":
            say(f"{len(each):,} inputs → {self.options.output}: {rows - failed:,} of {rows:,} rows answered")
        if broken:
            raise reworded(broken[0], "\n".join(map(str, broken)) + "\nall other inputs are done")
        return 1 if failed else 0

    def _resolve_all(self, each: Sequence[tuple[Sequence[str], str | None]]) -> list[ResolvedJob]:
        """Resolve all jobs. Raises one ColumnsError for all inputs that cannot be answered, and else as `resolve_job`
        does."""
        from nvcli.job.input.column_check import ColumnsError

        jobs: list[ResolvedJob] = []
        refused: list[ColumnsError] = []
        for one in each:
            try:
                jobs.append(self._resolve(*one))
            except ColumnsError as error:
                refused.append(error)
        if refused:
            raise reworded(refused[0], "\n".join(map(str, refused)))
        return jobs

    def _resolve(self, inputs: Sequence[str], output: str | None) -> ResolvedJob:
        from nvcli.job.run.resolve import resolve_job

        return resolve_job(
            self.run,
            inputs=inputs,
            output=output,
            limit=self.options.limit,
            shard=self.shard,
            overwrite=self.options.overwrite,
            setter_of=self.source.setter,
        )

    def _answer(
        self,
        inputs: Sequence[str],
        output: str | None,
        progress: Progress,
        report: ReportFile | None,
        *,
        engines: EngineSet | None = None,
        job: ResolvedJob | None = None,
    ) -> Summary:
        """Do one job, and report the outcome. `engines` and `job` are given where it is one of several."""
        from nvcli.errors import HopelessJob, OutputError, TooManyErrors, WorkerError
        from nvcli.job.output.sink import OutputClosed
        from nvcli.job.progress.summary import format_summary
        from nvcli.job.run.early_end import go_on_hint, next_steps, resume_hint
        from nvcli.job.run.generate import generate

        started_at = time.monotonic()
        begun = threading.Event()

        def hint() -> str:
            return resume_hint(sys.argv, inputs=inputs, output=output, has_begun=begun.is_set(), shard=self.shard)

        try:
            summary = generate(
                job or self._resolve(inputs, output),
                progress=progress,
                retry_errors=self.options.retry_errors,
                update=self.options.update,
                report=report,
                start=self.ahead.start_engine,
                engines=engines,
                started_at=started_at,
                on_begin=begun.set,
            )
        except (KeyboardInterrupt, Interrupted):  # before typer turns it into exit code 1
            raise Interrupted(hint()) from None
        except (WorkerError, OutputError, TooManyErrors) as error:
            raise reworded(error, f"{error}\n{hint()}") from error
        except HopelessJob as error:
            raise reworded(error, f"{error}\n{go_on_hint(sys.argv)}") from error
        except OutputClosed:
            raise OutputGone from None
        steps = next_steps(sys.argv, output=summary.output, errors=summary.errors) if summary.rows else {}
        if text := format_summary(summary, verbosity=self.verbosity, next_steps=steps):
            say(f"{summary.output}: {text}" if job is not None and self.verbosity == "quiet" else text)
        return summary

    def _open_displays(
        self, inputs: Sequence[str], each: Sequence[tuple[Sequence[str], str | None]]
    ) -> tuple[Progress, list[ReportFile | None]]:
        """Open the display, with the progress file, and a report for each job. Raises ConfigError.

        None of these files may be an input or output of the jobs.
        """
        from nvcli.job.files import is_terminal, job_files
        from nvcli.job.progress.display import make_progress
        from nvcli.job.progress.status_file import SideFile, StatusFile
        from nvcli.job.report.build import ReportFile

        options = self.options
        path, status_file = options.report, None
        taken: list[str] = []
        if options.progress_file is not None or path is not None:
            taken = job_files(inputs, options.output, self.shard)
        if options.progress_file is not None:
            status = SideFile("--progress-file", options.progress_file, taken=taken)
            taken += status.names
            status_file = StatusFile(status)
        progress = make_progress(
            options.progress,
            sys.stderr,
            beside_answers=is_terminal(options.output, inputs),
            verbosity=self.verbosity,
            status_file=status_file,
        )
        if path is None:
            return progress, [None] * len(each)
        names = [path]
        if len(each) > 1:  # report.html → report.a.out.jsonl.html
            names = [path.with_name(f"{path.stem}.{Path(str(output)).name}{path.suffix}") for _, output in each]
        return progress, [ReportFile(name, taken=taken) for name in names]


def _with_place(error: Error, inputs: Sequence[str], number: int, *, was_overwritten: bool) -> Error:
    """Return the error with a note on which job it ended, and what became of the others."""
    lines = f"{error}\nthis was input {number:,} of {len(inputs):,}, {inputs[number - 1]}"
    if number > 1:
        lines += "; the inputs before it are answered"
    if number < len(inputs) and was_overwritten:
        lines += "; the inputs after it were not begun: name them with --overwrite to answer them again"
    return reworded(error, lines)
