"""The plan of a run: how many replicas to start, their configuration, and how they get rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import adapter_choice
from nvcli.core.system.host_memory import available_ram
from nvcli.core.validation import show
from nvcli.errors import ConfigError
from nvcli.job.files import STREAM
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job
from nvcli.job.planning.duplicates import Duplicates
from nvcli.job.planning.layout import chooses_layout, resolve_layout
from nvcli.job.planning.planner import Planner
from nvcli.job.row_set import AnsweredRows
from nvcli.job.run.adapter_modes import describe_modes
from nvcli.job.run.device import unused_gpu
from nvcli.job.run.kept_weights import explain_choice
from nvcli.job.run.resolve import ResolvedJob, ResolvedModel
from nvcli.sizing.ram import check_ram

MIN_WINDOW_ROWS = 8192
_WAVES = 8
"""How many times the rows that run at once are read ahead, and how many rows may overtake others to run with those of
their merged adapter."""
MAX_WINDOW_BYTES = 64 * 1024 * 1024
"""Maximum bytes of the rows in the planner, and again of those that wait for the answer of an equal row."""
MANY_REQUESTS = 16
"""Requests are counted up to this many times `max_num_seqs` when a layout is chosen for a job."""
MAX_KEPT_ANSWER_BYTES = 16 * 1024 * 1024
"""Maximum bytes of the answers kept for equal rows to come."""
QUICKLY_READ_BYTES = 1 << 20
"""Inputs up to this size are read in advance to count their requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The replicas that a run starts."""

    engine_configs: tuple[EngineConfig, ...]
    """The configuration of each replica; they differ only in `replica`."""
    why: str
    """A line for the user on how quantised weights are kept and on the choice of replicas and GPUs; empty if there was
    no choice."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user."""

    @property
    def first(self) -> EngineConfig:
        """The configuration of the first replica."""
        return self.engine_configs[0]

    @property
    def num_gpus(self) -> int:
        """The GPUs of all replicas together; 0 on a CPU."""
        return sum(config.num_ranks for config in self.engine_configs if config.device == "cuda")


def plan_run(job: ResolvedJob, answered: AnsweredRows) -> RunPlan:
    """Decide what to start for the rows of a job that are not `answered` yet.

    A small job is counted first: it needs fewer slots and fewer CUDA graphs. Raises ConfigError and CapacityError
    where no layout is possible on the GPUs that are seen, or a CPU run's weights do not fit the RAM.
    """
    enough = job.config.max_num_seqs * (MANY_REQUESTS if chooses_layout(job.run, job.config) else 1)
    num_requests = count_requests(job.inputs, job.make_reader(answered), enough=enough)
    return plan_replicas(job, num_requests=num_requests if num_requests < enough else None)


def plan_replicas(resolved: ResolvedModel, *, num_requests: int | None) -> RunPlan:
    """Decide what to start for `num_requests`; None: many, or not known. Raises as `plan_run` does."""
    run, config = resolved.run, resolved.config
    layout = resolve_layout(run, config, resolved.model, num_requests=num_requests)
    check_ram(config, resolved.model, num_replicas=layout.data_parallel_size, available=available_ram())
    config = layout.apply(config)
    if num_requests is not None:
        config = msgspec.structs.replace(config, max_num_seqs=min(num_requests, config.max_num_seqs))
    kept = explain_choice(run, resolved.model, config, adapter=resolved.adapter)
    return RunPlan(
        engine_configs=tuple(
            msgspec.structs.replace(config, replica=replica) for replica in range(layout.data_parallel_size)
        ),
        warnings=tuple(
            f"warning: {line}"
            for line in (unused_gpu(run), _lone_ranks(run, config), *_other_bases(resolved))
            if line is not None
        ),
        why="; ".join(filter(None, (kept, layout.why, *describe_modes(run, config)))),
    )


def _lone_ranks(run: RunConfig, config: EngineConfig) -> str | None:
    """Return a note that attention by rows was asked for, and has no effect."""
    if not run.enable_attention_dp or config.enable_attention_dp:
        return None
    return (
        "`enable_attention_dp` (--attention-dp) has no effect, as `tensor_parallel_size` (--tp) is 1 here; leave it "
        "out, or raise --tp"
    )


def _other_bases(resolved: ResolvedModel) -> Iterator[str]:
    """Yield a note for each adapter whose base model is not the run's. Folders are compared by their last names, or by
    their names in the Hugging Face cache."""
    choice, model = adapter_choice(resolved.run.lora), Path(resolved.run.model)
    adapters = {} if resolved.adapter is None or choice.merged is None else {choice.merged: resolved.adapter}
    for name, adapter in {**adapters, **resolved.row_adapters}.items():
        base = adapter.config.base
        if base is None or Path(base).name.lower() == model.name.lower():
            continue
        if f"models--{base.replace('/', '--')}" not in model.parts:
            yield (
                f"the adapter {name} was made for {show(base)[1:-1]} (base_model_name_or_path), and the model is "
                f"{resolved.run.model}; its shapes fit"
            )


def count_requests(inputs: Sequence[str], reader: RowReader, *, enough: int) -> int:
    """Count the requests (samples of rows) that the inputs make, at least 1.

    Returns `enough` where they make more, take long to read, or cannot be read twice. `reader` reads the inputs.
    """
    paths = [Path(name) for name in inputs if name != STREAM]
    if len(paths) < len(inputs) or any(not path.is_file() for path in paths):
        return enough
    if sum(path.stat().st_size for path in paths) > QUICKLY_READ_BYTES:
        return enough
    count = 0
    try:
        for rows in reader.batches():
            count += sum(row.sampling.num_samples for row in rows if isinstance(row, Job))
            if count >= enough:
                return enough
    except ConfigError:
        return enough  # a damaged file: the job answers the rows before the damage, and reports it then
    return max(1, count)


def make_planner(run: RunConfig, config: EngineConfig, num_replicas: int) -> Planner:
    """Make the planner of a run with `num_replicas` of this configuration."""
    rows = window_rows(run, num_replicas)
    # With `order: input`, answered rows wait for the row that is passed over, and a crash loses those that wait. So
    # rows pass others only to be with those that begin alike, and no more than a window of them; to be with those of
    # their merged adapter, no more than a few times as many as run at once: else a run that is killed before a whole
    # window is answered would never get on.
    in_order = run.job.order == "input"
    in_turn = _WAVES * run.max_num_seqs * num_replicas if config.merged_adapters else rows
    return Planner(
        block_size=config.block_size if run.job.plan and config.enable_prefix_caching else None,
        longest_first=run.job.plan and not in_order,
        max_rows=rows,
        max_bytes=MAX_WINDOW_BYTES,
        max_passed_over=in_turn if in_order else 4 * rows,
        num_replicas=num_replicas,
        merged_adapters=config.merged_adapters,
    )


def make_duplicates(run: RunConfig, num_replicas: int) -> Duplicates:
    """Make the object that finds equal rows. If `job.plan` is off, every row is computed."""
    return Duplicates(
        max_rows=window_rows(run, num_replicas),
        max_bytes=MAX_WINDOW_BYTES,
        max_kept_bytes=MAX_KEPT_ANSWER_BYTES,
        is_on=run.job.plan,
    )


def window_rows(run: RunConfig, num_replicas: int) -> int:
    """Return how many rows to read ahead, so that the planner has a choice."""
    return max(MIN_WINDOW_ROWS, _WAVES * run.max_num_seqs * num_replicas)
