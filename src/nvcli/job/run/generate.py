"""`generate`: one job from its files to its files.

A job that is resolved (`job.run.resolve`: what is asked for, checked before a process is started) is planned
(`job.run.plan`: what to start for it) and run. While the engines load the model, a background thread imports the
tokenizer and reads ahead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator

from nvcli.core.byte_sizes import counted, parse_size
from nvcli.core.config import JobConfig
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import convert
from nvcli.errors import ConfigError, HopelessJob, TooManyErrors, WorkerError
from nvcli.job.input.known_input import check_unchanged
from nvcli.job.output.job_output import JobOutput, OutputOptions, open_output
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.writer import ResultWriter
from nvcli.job.progress.display import Progress
from nvcli.job.progress.run_status import RunView
from nvcli.job.progress.summary import RunTimes, Summary, summary_of_complete_job
from nvcli.job.report.build import ReportFile, build_report
from nvcli.job.report.data import Timeline
from nvcli.job.run.counts import Counts, LeadingErrors
from nvcli.job.run.early_end import Interrupts, keep_traceback
from nvcli.job.run.engines import EngineEvents, EngineSet, StartEngine, start_engine
from nvcli.job.run.loop import JobLoop
from nvcli.job.run.plan import RunPlan, plan_replicas, plan_run
from nvcli.job.run.resolve import ResolvedJob
from nvcli.job.shard import WHOLE, Shard
from nvcli.job.text.tokenizer import Tokenizer


def generate(
    job: ResolvedJob,
    *,
    progress: Progress,
    retry_errors: bool = False,
    update: bool = False,
    report: ReportFile | None = None,
    start: StartEngine = start_engine,
    engines: EngineSet | None = None,
    started_at: float | None = None,
    on_begin: Callable[[], None] = lambda: None,
) -> Summary:
    """Answer the rows of a job, or of its shard, as they would be answered in the whole job.

    An output of the same job is continued, unless the job overwrites it; `retry_errors` answers its failed rows again,
    and `update` the rows of its inputs that have changed since. `report` is written when the run is over, however it
    ends. `start` starts the engine of one replica. With `engines`, those are used and go on running for other jobs.
    `started_at` is when the run began, by `time.monotonic` (None: now). `on_begin` is called once the run has begun a
    new output; what was there before is gone then.

    Raises ConfigError, LoadError, CapacityError, ModelError, WorkerError, InputChanged, OutputError, TooManyErrors or
    HopelessJob; OutputClosed when nobody reads the output any more; KeyboardInterrupt after a signal that asks for the
    end (`end_signals`). Rows that were answered by then are in the output.
    """
    started_at = started_at or time.monotonic()
    run = job.run
    for flag, is_given in (("--retry-errors", retry_errors), ("--update", update)):
        if job.overwrite and is_given:
            raise ConfigError(f"--overwrite and {flag} exclude each other: start over, or keep what is answered")
    sampled = [known.state.mtime_ns / 1e9 for known in job.known_inputs if known.is_sampled]
    options = OutputOptions(
        order=run.job.order,
        can_continue=job.can_continue,
        overwrite=job.overwrite,
        retry_errors=retry_errors,
        update=update,
        identify_rows=job.identify_rows if job.can_continue else None,
        sampled_at=max(sampled, default=None),
        limit=job.limit,
        shard=job.shard,
        reorder_bytes=parse_size(run.job.reorder_memory) or 0,
        text_field=run.job.text_field,
        on_begin=on_begin,
    )
    opened = open_output(job.output, job.manifest, options)  # before standard output is set aside: it may be that
    # However the run ends, another run may have the output only after all else is closed.
    with contextlib.closing(opened), _tracebacks_kept(job.output), Interrupts() as interrupts:
        for note in (*job.notes, *opened.notes):
            progress.note(note)
        if opened.finished is not None:
            summary = summary_of_complete_job(job.output, opened.finished, time.monotonic() - started_at)
            if report is not None:
                report.write(build_report(job, summary), progress.warn)
            return summary
        for note in job.describe_kinds(job.first_kinds):
            progress.note(note)
        with interrupts.at_once():  # it may read rows
            plan = plan_run(job, opened.answered) if engines is None else plan_replicas(job, num_requests=None)
        if plan.why:
            progress.note(plan.why)
        for warning in (*job.warnings, *plan.warnings):
            progress.warn(warning)
        with contextlib.ExitStack() as processes:
            if engines is None:
                engines = EngineSet(start)
                processes.callback(engines.close)
            current = _JobRun(job, plan, opened, progress, engines, started_at=started_at)
            with current.reported(report), contextlib.closing(progress), _rare_collections(), _stdout_aside():
                current.run(interrupts.check)
    return current.summary()


class _JobRun:
    """One run of a job: its parts, and what they did."""

    def __init__(
        self,
        job: ResolvedJob,
        plan: RunPlan,
        opened: JobOutput,
        progress: Progress,
        engines: EngineSet,
        *,
        started_at: float,
    ) -> None:
        """`started_at` is when the run began, by `time.monotonic`."""
        self._job = job
        self._plan = plan
        self._opened = opened
        self._progress = progress
        self._engines = engines
        self._started_at = started_at
        self._generated_at: float | None = None
        self._counts = Counts(
            convert(dict(job.sampling_defaults), SamplingParams), generates=job.run.task == "generate"
        )
        self._counts.rows_resumed = opened.answered.all.count
        if opened.answered.all.count == opened.answered.failed.count:
            self._counts.leading = LeadingErrors(job.run.job.max_leading_errors)
        self._events = EngineEvents(
            engines, job.run.model, output=job.output, note=progress.note, detail=progress.detail, warn=progress.warn
        )
        self._reader = job.make_reader(opened.answered, opened.digests)
        self._feeder = job.make_feeder(self._reader, self._load_tokenizer)
        self._told_kinds = set(job.first_kinds)
        """The kinds of prompts that the user has been told about."""
        self._view = RunView(
            self._counts,
            self._reader,
            self._feeder,
            limit=job.limit,
            started_at=started_at,
            output=job.output,
            on_gpu=plan.num_gpus > 0,
        )
        self._timeline = Timeline(self._counts, started_at=started_at)

    def run(self, check_interrupts: Callable[[], None]) -> None:
        """Answer all rows and finish the output. `check_interrupts` raises if a signal has asked for the end.

        However it ends, the output is made safe; whoever has the engines ends them after that.
        """
        writer = _make_writer(self._opened, self._job.run.job, self._job.shard or WHOLE)
        with contextlib.ExitStack() as rows:
            rows.callback(writer.close_early)
            rows.callback(self._feeder.stop)
            loop = JobLoop(
                self._job.run,
                self._plan,
                self._engines.take(self._plan.engine_configs),
                self._feeder,
                writer,
                self._counts,
                self._events,
                first_request_id=self._engines.next_request_id,
            )
            self._feeder.start()
            loop.run(lambda: self._each_round(check_interrupts))
            self._engines.next_request_id = loop.next_request_id
            self._tell()
            self._check_errors()
            self._generated_at = time.monotonic()
            check_unchanged(self._job.known_inputs)
            writer.close()
            num_notes = len(self._opened.notes)
            self._opened.finish(
                rows=self._num_rows,
                errors=self._opened.answered.errors + self._counts.errors,
                rows_read=self._reader.rows_read,
                all_read=self._reader.all_read,
            )
            self._counts.rows_resumed = self._opened.answered.all.count  # rows that the input does not have are gone
            for note in self._opened.notes[num_notes:]:
                self._progress.note(note)

    def summary(self) -> Summary:
        """Return the summary of the run. Call it at the end."""
        counts, feeder = self._counts, self._feeder
        now = time.monotonic()
        generating = (self._generated_at or now) - counts.started_at if counts.started_at is not None else 0.0
        startups = [ready.seconds for ready in self._events.ready]
        return Summary(
            output=self._job.output,
            rows=self._num_rows,
            errors=dict(self._opened.answered.errors + counts.errors),
            counts=counts,
            sampling=self._job.sampling,
            num_gpus=self._plan.num_gpus,
            limit=None if self._reader.all_read else self._job.limit,
            row_warnings=self._reader.warnings.totals(),
            times=RunTimes(
                total=now - self._started_at,
                generating=generating,
                startup=max(startups, key=lambda parts: sum(parts.values()), default={}),
                loading_tokenizer=feeder.load_seconds,
                reading=feeder.read_seconds,
                tokenizing=feeder.tokenize_seconds,
            ),
        )

    @contextlib.contextmanager
    def reported(self, report: ReportFile | None) -> Iterator[None]:
        """Write the report of the run when the `with` ends, however it ends. None: no report."""
        error: BaseException | None = None
        self._counts.outcomes.shows_images = report is not None and report.is_page
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            if report is not None:
                self._timeline.sample(is_last=True)
                built = build_report(
                    self._job,
                    self.summary(),
                    error=error,
                    plan=self._plan,
                    ready=self._events.ready,
                    timeline=self._timeline.points,
                )
                report.write(built, self._progress.warn)

    @property
    def _num_rows(self) -> int:
        """Rows of the whole output, including those of earlier runs."""
        return self._counts.rows_resumed + self._counts.rows_done

    def _load_tokenizer(self) -> Tokenizer:
        tokenizer = self._job.load_tokenizer(self._reader.warnings)
        gc.collect()
        gc.freeze()  # what was imported stays: looking through it again and again takes a fifth of a run of short rows
        return tokenizer

    def _each_round(self, check_interrupts: Callable[[], None]) -> None:
        check_interrupts()
        self._tell()
        self._progress.update(self._view)
        self._timeline.sample()
        self._check_errors()

    def _tell(self) -> None:
        """Tell the user what was found in the rows since the last call."""
        if new_kinds := self._reader.kinds - self._told_kinds:
            self._told_kinds |= new_kinds
            for note in self._job.describe_kinds(new_kinds):
                self._progress.note(note)
        for warning in self._reader.warnings.take_new():
            self._progress.warn(warning)

    def _check_errors(self) -> None:
        """Raise TooManyErrors if more rows failed than `job.max_errors` allows, and HopelessJob if the first ones all
        failed with one cause.

        Rows that failed in earlier runs do not count: the same command gets further each time.
        """
        leading = self._counts.leading
        if leading.all_failed:
            assert leading.first is not None
            raise HopelessJob(
                f"the first {self._job.run.job.max_leading_errors:,} rows all failed with {leading.first.type}, such "
                f"as {leading.first.message}\nthe others would likely fail too, so the run ends"
            )
        counts, allowed = self._counts, self._job.run.job.max_errors
        if allowed is not None and counts.rows_failed > allowed:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.errors.most_common())
            raise TooManyErrors(
                f"{counted(counts.rows_failed, 'row')} failed, and `job.max_errors` allows {allowed:,}: {kinds}"
            )


def _make_writer(opened: JobOutput, job: JobConfig, shard: Shard) -> ResultWriter:
    reorder = None
    if job.order == "input":
        answered = opened.answered.all
        reorder = ReorderBuffer(
            lambda index: answered.next_missing(shard.next_row(index), shard.count),
            max_bytes=parse_size(job.reorder_memory) or 0,
            folder=opened.folder,
        )
    return ResultWriter(opened.sink, opened.form, reorder=reorder, sync_seconds=job.sync_seconds)


@contextlib.contextmanager
def _tracebacks_kept(output: str) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise keep_traceback(error, output) from None


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage more rarely: rows and answers are many, and form no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Redirect standard output to standard error, for libraries, C code and child processes that print.

    Results have their own descriptor by then.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
