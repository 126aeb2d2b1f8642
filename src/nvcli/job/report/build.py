"""Builds the `Report` of a run, however it ended."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from nvcli.core.messages import EngineReady
from nvcli.core.system.nvidia_smi import visible_gpus
from nvcli.core.system.terminal_text import without_secrets
from nvcli.core.system.versions import installed_versions
from nvcli.core.validation import Path as KeyPath
from nvcli.engine.request import SpeculationFigures
from nvcli.errors import ConfigError
from nvcli.job.files import STREAM
from nvcli.job.progress.run_status import how_it_ended, iso_time
from nvcli.job.progress.status_file import SideFile
from nvcli.job.progress.summary import Summary
from nvcli.job.report.data import (
    Engine,
    Lengths,
    Outcome,
    OutputRows,
    Rates,
    Report,
    RunRows,
    TimePoint,
    Tokens,
    describe_lengths,
)
from nvcli.job.run.counts import Example
from nvcli.job.run.plan import RunPlan
from nvcli.job.run.resolve import ResolvedJob
from nvcli.job.run.settings import config_settings, sampling_settings


def build_report(
    job: ResolvedJob,
    summary: Summary,
    *,
    error: BaseException | None = None,
    plan: RunPlan | None = None,
    ready: Sequence[EngineReady] = (),
    timeline: Sequence[TimePoint] = (),
) -> Report:
    """Build the report of a finished run. `error` is what ended it early, if anything did.

    `plan` is what was started, and None where nothing was; `ready` holds the reports of the replicas that came to be
    ready.
    """
    counts, outcomes, times = summary.counts, summary.counts.outcomes, summary.times
    state, message = how_it_ended(error)
    seconds = max(times.generating, 1e-3)
    now = datetime.datetime.now(datetime.UTC)

    def text_setter(path: KeyPath) -> str | None:
        setter = job.setter_of(path)
        return None if setter is None else _as_text(setter)

    return Report(
        state=state,
        message=message,
        command=_as_text(without_secrets(shlex.join(["nvcli", *sys.argv[1:]]))),
        model=job.run.model,
        inputs=list(job.inputs),
        output=job.output,
        started_at=iso_time(now - datetime.timedelta(seconds=times.total)),
        ended_at=iso_time(now),
        seconds=round(times.total, 3),
        generating_seconds=round(times.generating, 3),
        gpu_hours=summary.gpu_hours if summary.num_gpus else None,
        was_complete=summary.was_complete,
        whole_output=OutputRows(
            rows=summary.rows,
            answered=summary.rows - summary.rows_failed,
            failed=summary.rows_failed,
            errors=dict(summary.errors),
            num_bytes=_size(job.output),
        ),
        rows=RunRows(
            done=counts.rows_done,
            failed=counts.rows_failed,
            deduplicated=counts.rows_deduplicated,
            resumed=summary.rows if summary.was_complete else counts.rows_resumed,
        ),
        tokens=Tokens(
            prompt=counts.prompt_tokens,
            cached=counts.cached_tokens,
            generated=counts.completion_tokens,
            deduplicated=counts.deduplicated_tokens,
        ),
        rates=Rates(
            generated_tokens_per_second=round(counts.completion_tokens / seconds, 3),
            prompt_tokens_per_second=round(counts.prompt_tokens / seconds, 3),
            rows_per_second=round(counts.rows_done / seconds, 3),
        ),
        finish_reasons=_outcomes(outcomes.finish_reasons, outcomes.answer_examples),
        errors=_outcomes(counts.errors, outcomes.error_examples),
        prompt_lengths=describe_lengths(outcomes.prompt_lengths, total=outcomes.prompt_tokens),
        answer_lengths=_answer_lengths(summary),
        timeline=list(timeline),
        sampling=sampling_settings(job.run, job.model.generation_defaults, text_setter),
        own_sampling=dict(outcomes.own_sampling.most_common()),
        config=config_settings(job.run, text_setter),
        engine=None if plan is None else _engine(plan, ready, summary),
        versions=installed_versions(),
        warnings=list(summary.row_warnings),
    )


def _outcomes(kinds: Counter[str], examples: Mapping[str, list[Example]]) -> list[Outcome]:
    return [Outcome(kind=kind, count=count, examples=examples.get(kind, [])) for kind, count in kinds.most_common()]


def _answer_lengths(summary: Summary) -> Lengths:
    """Describe the computed answers, including those of rows that are not finished."""
    lengths, cut = Counter[int](), Counter[int]()
    ended = summary.counts.lengths
    for samples in ended.classes.values():
        lengths += samples.stopped + samples.cut
        cut += samples.cut
    return describe_lengths(lengths, cut=cut, total=ended.generated_tokens)


def _engine(plan: RunPlan, ready: Sequence[EngineReady], summary: Summary) -> Engine:
    config, first = plan.first, ready[0] if ready else None
    return Engine(
        device=config.device,
        dtype=config.weights_type,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=len(plan.engine_configs),
        gpus=_gpu_names(plan) if config.device == "cuda" else [],
        why=plan.why,
        attention_backend=first.attention_backend if first else None,
        kv_cache_tokens=first.kv_cache_tokens if first else None,
        kv_cache_bytes=first.kv_cache_bytes if first else None,
        weight_bytes=first.weight_bytes if first else None,
        startup_seconds={part: round(seconds, 3) for part, seconds in summary.times.startup.items()},
        preemptions=summary.counts.engine_total("num_preemptions"),
        speculation=SpeculationFigures.of(summary.counts.replicas),
        lost_replicas=summary.counts.num_lost_replicas,
    )


def _gpu_names(plan: RunPlan) -> list[str]:
    gpus = visible_gpus()
    if isinstance(gpus, str):
        return []
    indices = [config.gpu_index(rank) for config in plan.engine_configs for rank in range(config.num_ranks)]
    return [gpus[index].name for index in indices if index < len(gpus)]


def _as_text(name: str) -> str:
    """Escape the parts of a text that are not UTF-8, as in file names."""
    return name.encode(errors="backslashreplace").decode()


def _size(output: str) -> int | None:
    path = Path(output)
    return path.stat().st_size if output != STREAM and path.is_file() else None


SUFFIXES = (".html", ".json")


class ReportFile:
    """The file that `--report` names: a page (`.html`) or JSON (`.json`), written at the end of the run."""

    def __init__(self, path: Path, *, taken: Collection[str] = ()) -> None:
        """`taken` are files that `path` must not replace. Raises ConfigError for a bad `path`."""
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"--report {path}: allowed: a name that ends in {' or '.join(SUFFIXES)}")
        self._file = SideFile("--report", path, taken=taken)

    @property
    def is_page(self) -> bool:
        """Whether it is written as a page, not as JSON."""
        return self._file.path.suffix.lower() == SUFFIXES[0]

    def write(self, report: Report, warn: Callable[[str], None]) -> None:
        """Replace the file. If that fails, `warn` is called, because the rows matter more."""
        try:
            self._file.replace(self._encode(report))
        except OSError as error:
            warn(f"warning: {self._file} cannot be written: {error.strerror}")

    def _encode(self, report: Report) -> bytes:
        if not self.is_page:
            return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        from nvcli.job.report.page import render_html  # late: jinja2 is for this alone

        return render_html(report).encode(errors="backslashreplace")
