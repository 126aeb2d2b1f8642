"""`generate`: one job from its files to its files. Starts what a run needs, in the order that is fastest, and ends it.

Everything that can be checked is checked before a process is started. Then the engines load the model, and meanwhile
a background thread imports the tokenizer and reads ahead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from nvcli.config import EngineConfig, JobConfig, RunConfig, parse_size
from nvcli.errors import ConfigError, NvcliError, TooManyErrors, WorkerError
from nvcli.job_run.counts import Counts
from nvcli.job_run.early_end import Interrupts, keep_traceback
from nvcli.job_run.feeder import Feeder
from nvcli.job_run.job_facts import job_facts
from nvcli.job_run.loop import Engine, Pipeline
from nvcli.job_run.planning.duplicates import Duplicates
from nvcli.job_run.planning.job_size import most_requests
from nvcli.job_run.planning.planner import Planner
from nvcli.job_run.progress.display import Progress
from nvcli.job_run.progress.run_status import RunView
from nvcli.job_run.progress.summary import Summary
from nvcli.job_run.resolve import chooses_layout, resolve_engine_config, resolve_layout, row_keys, sampling_defaults
from nvcli.job_run.text.prepare import ModelLimits
from nvcli.job_run.text.tokenizer import Tokenizer, check_tokenizer_files
from nvcli.jobs.files import check_inputs, check_output, choose_output, expand_inputs
from nvcli.jobs.input.digests import describe_inputs, is_repeatable
from nvcli.jobs.input.reader import RowReader
from nvcli.jobs.output.job_output import JobOutput, open_output
from nvcli.jobs.output.manifest import Finished, Manifest
from nvcli.jobs.output.reorder import ReorderBuffer
from nvcli.jobs.output.writer import ResultWriter
from nvcli.jobs.rows.parser import RowParser
from nvcli.messages import EngineReady
from nvcli.models.checkpoint import resolve_model
from nvcli.models.config import load_model_config

MIN_WINDOW_ROWS = 8192
MAX_WINDOW_BYTES = 64 * 1024 * 1024
"""Of rows among which the plan chooses, and again of rows that wait for the answer of an equal one."""
MANY_REQUESTS = 16
"""Times `max_num_seqs`: a job with more is not counted further when a layout is chosen for it."""
MAX_KEPT_ANSWER_BYTES = 16 * 1024 * 1024
"""Of answers that are kept in case an equal row comes later."""


StartEngine = Callable[[EngineConfig], Engine]


def start_engine(config: EngineConfig) -> Engine:
    """The real thing: an engine process and its ranks."""
    from nvcli.engine.client import EngineClient

    return EngineClient.start(config, name="engine" if config.replica == 0 else f"engine {config.replica}")


def generate(
    run: RunConfig,
    *,
    inputs: Sequence[str],
    output: str | None,
    progress: Progress,
    overwrite: bool = False,
    retry_errors: bool = False,
    limit: int | None = None,
    start: StartEngine = start_engine,
) -> Summary:
    """Answer the rows of `inputs` (`-`: standard input) into `output` (None: beside the input; `-`: standard output).

    An output of the same job is continued; `overwrite` starts it anew, `retry_errors` answers its failed rows again.
    Raises ConfigError, LoadError, CapacityError, WorkerError, OutputError or TooManyErrors; OutputClosed when nobody
    reads the output any more; KeyboardInterrupt after SIGINT or SIGTERM. Rows that were answered by then are in the
    output.
    """
    started_at = time.monotonic()
    if overwrite and retry_errors:
        raise ConfigError("--overwrite and --retry-errors exclude each other: start anew, or keep what is answered")
    inputs = expand_inputs(inputs, output)
    check_inputs(inputs)
    output = choose_output(inputs, output)
    check_output(inputs, output)
    model_path = resolve_model(run.model)
    model = load_model_config(model_path)
    check_tokenizer_files(model_path)
    config = resolve_engine_config(run, model_path, model)
    defaults = sampling_defaults(run, model)
    can_continue = is_repeatable(inputs)
    job = Manifest(
        created=int(time.time()),
        model=run.model,
        facts=job_facts(run, config, defaults, model_path=model_path),
        inputs=list(zip(inputs, describe_inputs(inputs), strict=True)) if can_continue else [],
    )
    limits = ModelLimits(
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        on_too_long=run.job.on_too_long,
    )
    counts = Counts()
    reports: list[EngineReady] = []

    def on_ready(ready: EngineReady) -> None:
        if not reports:  # replicas are alike
            progress.note(_describe(ready, run))
            for note in ready.notes:
                progress.note(note)
        reports.append(ready)

    def on_lost(number: int, error: NvcliError, num_rows: int) -> None:
        error = keep_traceback(error, output)
        rows = "1 unfinished row goes" if num_rows == 1 else f"{num_rows:,} unfinished rows go"
        progress.note(f"warning: a copy of the model died, and its {rows} to the others: {error}")

    with contextlib.ExitStack() as stack:
        # Undone in reverse, however the run ends: the output is made safe first, then the processes are ended, and
        # only then another run may have the output.
        opened = open_output(  # before standard output is set aside: it may be /dev/stdout by name
            output,
            job,
            order=run.job.order,
            can_continue=can_continue,
            overwrite=overwrite,
            retry_errors=retry_errors,
            limit=limit,
            reorder_bytes=parse_size(run.job.reorder_memory) or 0,
        )
        stack.callback(opened.close)
        stack.enter_context(_tracebacks_kept(output))
        interrupts = stack.enter_context(Interrupts())  # from here on a signal waits for a good moment
        for note in opened.notes:
            progress.note(note)
        if opened.finished is not None:
            return _complete(output, opened.finished, started_at)
        counts.rows_resumed = opened.answered.all.count

        def make_reader() -> RowReader:
            parser = RowParser(defaults, row_keys(run.job))
            return RowReader(inputs, parser, limit=limit, answered=opened.answered)

        enough = config.max_num_seqs * (MANY_REQUESTS if chooses_layout(run, config) else 1)
        num_requests = most_requests(inputs, make_reader, enough=enough)
        layout = resolve_layout(run, config, model, num_requests=num_requests if num_requests < enough else None)
        if layout.why:
            progress.note(layout.why)
        num_seqs = min(num_requests, config.max_num_seqs)
        config = msgspec.structs.replace(layout.apply(config), max_num_seqs=num_seqs)
        reader = make_reader()
        feeder = Feeder(reader, lambda: _load_tokenizer(model_path), limits)
        planner, duplicates = _plan(run, layout.data_parallel_size)
        stack.callback(progress.close)
        stack.enter_context(_rare_collections())
        stack.enter_context(_stdout_aside())
        processes = stack.enter_context(contextlib.ExitStack())
        writer = _make_writer(opened, run.job)
        stack.callback(writer.close_early)
        stack.callback(feeder.stop)
        engines = []
        for replica in range(layout.data_parallel_size):
            engines.append(start(msgspec.structs.replace(config, replica=replica)))
            processes.callback(engines[-1].close)
        feeder.start()
        pipeline = Pipeline(
            engines,
            feeder,
            planner,
            duplicates,
            writer,
            counts,
            seed=run.seed,
            max_num_seqs=config.max_num_seqs,
            keep_going=run.job.keep_going,
            on_ready=on_ready,
            on_lost=on_lost,
            on_note=progress.note,
        )
        view = RunView(counts, reader, feeder, limit=limit, started_at=started_at, output=output)

        def each_round() -> None:
            interrupts.check()
            progress.update(view)
            _check_errors(counts, run.job.max_errors)

        pipeline.run(each_round)
        _check_errors(counts, run.job.max_errors)
        generated_at = time.monotonic()
        writer.close()
        rows, errors = counts.rows_resumed + counts.rows_done, opened.errors + counts.errors
        opened.finish(rows=rows, errors=errors, rows_read=reader.rows_read, all_read=reader.all_read)
    return Summary(
        output=output,
        rows=rows,
        rows_resumed=counts.rows_resumed,
        errors=dict(errors),
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        total_seconds=time.monotonic() - started_at,
        generation_seconds=generated_at - counts.started_at if counts.started_at is not None else 0.0,
        startup=max((report.seconds for report in reports), key=lambda parts: sum(parts.values()), default={}),
        tokenizer_load_seconds=feeder.load_seconds,
        reading_seconds=feeder.read_seconds,
        tokenizing_seconds=feeder.tokenize_seconds,
        loop_seconds=dict(counts.seconds),
        num_preemptions=counts.num_preemptions,
        num_lost_engines=counts.num_lost_engines,
        rows_deduplicated=counts.rows_deduplicated,
        deduplicated_tokens=counts.deduplicated_tokens,
    )


def _describe(ready: EngineReady, run: RunConfig) -> str:
    tokens = ready.num_blocks * ready.block_size
    return (
        f"{run.model} is ready: KV cache for {tokens:,} tokens "
        f"({ready.kv_cache_bytes / 2**20:,.0f} MiB a rank), weights {ready.weight_bytes / 2**20:,.0f} MiB a rank"
    )


def _plan(run: RunConfig, num_copies: int) -> tuple[Planner, Duplicates | None]:
    running = run.max_num_seqs * num_copies
    rows = max(MIN_WINDOW_ROWS, 8 * running)
    planner = Planner(
        block_size=run.block_size if run.job.plan and run.enable_prefix_caching else None,
        longest_first=run.job.plan,
        max_rows=rows,
        max_bytes=MAX_WINDOW_BYTES,
        # Rows that are to be written in the order of the input wait for the one that is passed over, and a crash loses
        # those that wait: no more than run at a time.
        max_passed_over=running if run.job.order == "input" else 4 * rows,
        num_lanes=num_copies,
    )
    if not run.job.plan:
        return planner, None
    return planner, Duplicates(max_rows=rows, max_bytes=MAX_WINDOW_BYTES, max_kept_bytes=MAX_KEPT_ANSWER_BYTES)


def _load_tokenizer(model_path: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(model_path)
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it again and again takes a fifth of a run of short rows
    return tokenizer


@contextlib.contextmanager
def _tracebacks_kept(output: str) -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise keep_traceback(error, output) from None


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Rows and answers make no cycles, and there are many: Python need not look for cycles every 700 objects."""
    before = gc.get_threshold()
    gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _make_writer(opened: JobOutput, job: JobConfig) -> ResultWriter:
    reorder = None
    if job.order == "input":
        reorder = ReorderBuffer(
            opened.answered.all.next_missing, max_bytes=parse_size(job.reorder_memory) or 0, folder=opened.folder
        )
    return ResultWriter(opened.sink, opened.form, reorder=reorder, sync_seconds=job.sync_seconds)


def _check_errors(counts: Counts, max_errors: int | None) -> None:
    """Raises TooManyErrors. Rows that failed in earlier runs do not count: the same command gets further each time."""
    if max_errors is not None and counts.rows_failed > max_errors:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.errors.most_common())
        raise TooManyErrors(f"{counts.rows_failed:,} rows failed, and `job.max_errors` allows {max_errors:,}: {kinds}")


def _complete(output: str, finished: Finished, started_at: float) -> Summary:
    return Summary(
        output=output,
        rows=finished.rows,
        rows_resumed=finished.rows,
        errors=finished.errors,
        was_complete=True,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        total_seconds=time.monotonic() - started_at,
        generation_seconds=0.0,
        startup={},
        tokenizer_load_seconds=0.0,
        reading_seconds=0.0,
    )


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Whatever prints to standard output goes to standard error: libraries, C code, the processes that are started.

    Results have a descriptor of their own by then.
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
