"""`check_job`: reads and tokenizes the rows of a job as a run would, and reports what the job will do.

Rows come through the reader, the parser, the chat template and the tokenizer that `generate` uses, so every error row
is the one that it would write. No GPU is used and no weights are read. Beyond a constant, memory is at most 22
bytes for each of the first 16 million different rows (`check.prefixes`), and what the reader keeps of the ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.config_source import ConfigSource
from nvcli.core.messages import NO_ADAPTER
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.core.validation import convert
from nvcli.errors import ConfigError, InputChanged, NvcliError
from nvcli.job.files import STREAM, expand_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import JobResult
from nvcli.job.row_set import AnsweredRows
from nvcli.job.run.adapter_modes import describe_modes
from nvcli.job.run.counts import LeadingErrors
from nvcli.job.run.early_end import Interrupts
from nvcli.job.run.resolve import ResolvedJob, resolve_job
from nvcli.job.run.settings import Setting, is_worth_showing
from nvcli.job.shard import Shard
from nvcli.job.text.prepare import PreparedRow
from nvcli.tools.check.image_counts import ImageReport
from nvcli.tools.check.lengths import PromptLengths, lengths_of
from nvcli.tools.check.machine import Forecast, Machine, estimate_job
from nvcli.tools.check.progress import CheckProgress
from nvcli.tools.check.prompts import ShownPrompt, show_prompt
from nvcli.tools.check.tally import ErrorExample, Tally

USUAL_ANSWER_TOKENS = 256
"""Answer length that forecasts assume unless the user gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of a check, apart from the job itself."""

    limit: int | None = None
    """Number of input rows to read; None: all."""
    shard: Shard | None = None
    """Shard whose rows are checked; None: all rows."""
    num_prompts: int = 3
    """Number of prompts to show."""
    answer_tokens: int | None = None
    """The expected length of an answer; None: `USUAL_ANSWER_TOKENS`."""
    gpus: Sequence[SmiGpu] | None = None
    """The GPUs to estimate for; None: those of this machine."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about a job. Numbers refer to the rows that were read."""

    inputs: list[str]
    model: str
    device: str
    dtype: str
    max_model_len: int
    is_complete: bool
    """Whether all of the job's rows were read."""
    rows: int
    rows_failed: int
    errors: list[ErrorExample]
    prompts: list[ShownPrompt]
    """The first prompts."""
    lengths: PromptLengths | None
    """Prompt lengths of the rows that can be answered; None: no row can."""
    images: ImageReport | None
    """The images of these rows; None: they have none."""
    equal_rows: int
    repeated_prompts: int
    may_miss_equal_rows: bool
    prompt_tokens_to_compute: int
    """Prompt tokens without those of equal rows, before the prefix cache."""
    cached_tokens: int
    """The most of these that the prefix cache saves."""
    cached_tokens_are_exact: bool
    """Whether `cached_tokens` was counted rather than scaled up from a sample."""
    notes: list[str]
    """Notes on how rows become prompts."""
    warnings: list[str]
    sampling: list[Setting]
    """Sampling of rows without their own: settings that were changed, and the most important others."""
    rows_with_own_sampling: int
    answers: int
    """Answers to compute: `n` for each row that does not repeat another one."""
    adapters: list[AdapterRows]
    """The LoRA adapters that rows may choose, in the order in which they were given."""
    rows_without_adapter: int
    """Rows that use the base model, or the adapter that is merged into it."""
    forecasts: list[Forecast]
    machine: Machine
    seconds: float
    """Time for reading and tokenizing, without loading the tokenizer."""


class AdapterRows(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that rows may choose."""

    name: str
    rank: int
    """Its largest rank."""
    rows: int
    """Rows that choose it and can be answered."""


@dataclass(frozen=True, slots=True)
class Check:
    """A report, and the error or signal that ended the reading early, if any."""

    report: CheckReport
    ended_by: NvcliError | KeyboardInterrupt | None


def check_job(
    run: RunConfig,
    source: ConfigSource,
    *,
    inputs: Sequence[str],
    output: str | None = STREAM,
    options: CheckOptions,
    progress: CheckProgress,
) -> Check:
    """Check the rows of `inputs`. `source` knows the origin of each key of `run`. Raises ConfigError and LoadError.

    `output` is the run's output, which is checked too; `-`: none is named. If an input cannot be read to its end,
    or a signal ends the check, the report covers the rows that were read.
    """
    if options.gpus is not None:
        if run.device == "cpu":
            raise ConfigError("--gpu estimates for GPUs, but `device` is cpu; leave one of the two out")
        run = msgspec.structs.replace(run, device="cuda")
    job = resolve_job(
        run,
        inputs=_expanded(inputs, output),
        output=output,
        limit=options.limit,
        shard=options.shard,
        weights=False,
        gpus=options.gpus,
        setter_of=source.setter,
    )
    reading = _Reading(job)
    reading.estimate(options)  # an impossible layout is an error before anything is read
    ended_by = reading.read(options.num_prompts, progress)
    return Check(reading.report(options, is_complete=ended_by is None), ended_by)


class _Reading:
    """Reads the rows of a job and keeps their totals."""

    def __init__(self, job: ResolvedJob) -> None:
        run = job.run
        self._job = job
        self._reader = job.make_reader(AnsweredRows())
        self._tally = Tally(
            defaults=convert(dict(job.sampling_defaults), SamplingParams),
            block_size=job.config.block_size if job.config.enable_prefix_caching else None,
            finds_equal_rows=run.job.plan,
        )
        self._prompts: list[ShownPrompt] = []
        self._leading = LeadingErrors(run.job.max_leading_errors)
        self._seconds = 0.0

    def read(self, num_prompts: int, progress: CheckProgress) -> NvcliError | KeyboardInterrupt | None:
        """Read all rows, and return what ended the reading early. Raises ConfigError if it ended at the first row."""
        job, tally = self._job, self._tally
        tokenizer = job.load_tokenizer(self._reader.warnings)
        started = time.monotonic()
        try:
            with Interrupts() as interrupts, interrupts.at_once(), closing(progress):
                for rows in job.prepare(self._reader, tokenizer):
                    for row in rows:
                        tally.add(row)
                        self._note_failure(row)
                        if len(self._prompts) < num_prompts and isinstance(row, PreparedRow):
                            self._prompts.append(show_prompt(row, tokenizer))
                    progress.update(tally.rows, _share_read(self._reader))
        except (ConfigError, InputChanged, KeyboardInterrupt) as error:
            if not tally.rows and isinstance(error, ConfigError):
                raise
            return error
        finally:
            self._seconds = time.monotonic() - started
        return None

    def _note_failure(self, row: PreparedRow | JobResult) -> None:
        leading = self._leading
        if leading.is_open and isinstance(row, JobResult):
            leading.expect(row.context.index)
            leading.add(row)
        else:
            leading.is_open = False

    def estimate(self, options: CheckOptions) -> tuple[Machine, list[Forecast]]:
        """Estimate the job from the rows that were read. Raises ConfigError if its layout is impossible."""
        return estimate_job(
            self._job,
            self._tally,
            gpus=options.gpus,
            answer_tokens=options.answer_tokens or USUAL_ANSWER_TOKENS,
            num_bytes=self._reader.bytes_total,
        )

    def report(self, options: CheckOptions, *, is_complete: bool) -> CheckReport:
        """Report on the rows that were read."""
        job, tally, row_warnings = self._job, self._tally, self._reader.warnings
        machine, forecasts = self.estimate(options)
        leading = self._leading
        hopeless = []
        if leading.all_failed and leading.first is not None:
            hopeless.append(
                f"the first {job.run.job.max_leading_errors:,} rows all fail with {leading.first.type}: a run would "
                "stop there, unless `job.max_leading_errors` is 0"
            )
        return CheckReport(
            inputs=list(job.inputs),
            model=job.run.model,
            device=job.config.device,
            dtype=job.config.weights_type,
            max_model_len=job.config.max_model_len,
            is_complete=is_complete,
            rows=tally.rows,
            rows_failed=tally.rows_failed,
            errors=tally.errors,
            prompts=self._prompts,
            lengths=lengths_of(tally.lengths),
            images=tally.images.report(),
            equal_rows=tally.equal_rows,
            repeated_prompts=tally.repeated_prompts,
            may_miss_equal_rows=tally.may_miss_equal_rows,
            prompt_tokens_to_compute=tally.computed_prompt_tokens,
            cached_tokens=tally.cached_tokens,
            cached_tokens_are_exact=tally.blocks is None or tally.blocks.is_exact,
            notes=[*job.notes, *job.describe_kinds(self._reader.kinds), *describe_modes(job.run, job.config)],
            warnings=[line.removeprefix("warning: ") for line in (*job.warnings, *row_warnings.take_new())]
            + row_warnings.totals()
            + hopeless,
            sampling=list(filter(is_worth_showing, job.sampling)),
            rows_with_own_sampling=tally.rows_with_own_sampling,
            answers=sum(tally.answers.values()),
            adapters=[
                AdapterRows(name=name, rank=rank, rows=tally.adapters[number])
                for number, (name, rank) in enumerate(
                    zip(job.adapter_names, job.config.lora_sizes.ranks, strict=True), start=1
                )
            ],
            rows_without_adapter=tally.adapters[NO_ADAPTER],
            forecasts=forecasts,
            machine=machine,
            seconds=self._seconds,
        )


def _expanded(inputs: Sequence[str], output: str | None) -> list[str]:
    """Replace patterns and folders by files. Without a named output, patterns leave out files that it could be."""
    return [
        file
        for name in inputs
        for file in expand_inputs([name], None if output == STREAM and not os.path.isdir(name) else output)
    ]


def _share_read(reader: RowReader) -> float | None:
    return min(1.0, reader.bytes_read / reader.bytes_total) if reader.bytes_total else None
