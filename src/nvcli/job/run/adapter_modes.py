"""The two modes of serving the LoRA adapters of a job's rows (`lora.mode`): merged into the weights in turn, while only
rows of one adapter run, or batched, beside rows of other adapters.

What merging can serve and batching cannot is merged. The rest is chosen by cost for a job whose rows can be counted
before it begins (`job.planning.adapter_costs`), and is batched otherwise. In 16 bits the mode may change answers, so it
is a fact of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import AdapterChoice, adapter_choice
from nvcli.core.system.nvidia_smi import visible_gpus
from nvcli.core.validation import list_some
from nvcli.errors import ConfigError, LoadError
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job
from nvcli.job.output.manifest import MERGED_FACT, merged_fact
from nvcli.job.planning.adapter_costs import AdapterWork, choose_merged
from nvcli.job.planning.job_time import GpuSpeed, gpu_speed
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.adapters.row_adapters import check_row_adapter
from nvcli.models.config import ModelConfig

_MOST_ROWS = 20_000
"""The most rows that are counted; the rest of a larger job is assumed to have the same share of each adapter."""
_USUAL_ANSWER = 512
"""Assumed length of an answer that may be longer."""
_CPU_SPEED = GpuSpeed(50e9, 1e12, link_bytes_per_second=10e9, link_seconds=1e-6)
"""Rough speeds of a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModes:
    """The possible modes of a run's adapters, by their numbers from 1."""

    merged: tuple[int, ...]
    """Adapters that are merged in turn whatever the rows are."""
    merged_only: tuple[int, ...]
    """Adapters that cannot be batched."""
    mergeable: tuple[int, ...]
    """Adapters that can be merged."""


def find_modes(choice: AdapterChoice, adapters: Sequence[Adapter], model: ModelConfig) -> AdapterModes:
    """Return the modes in which adapters can be served, with the weights in the format of `model`.

    Raises LoadError or ConfigError for an adapter that can be served in neither mode, or not in that of `lora.mode`.
    """
    merged_only, mergeable = [], []
    for number, adapter in enumerate(adapters, 1):
        problem: LoadError | None = None
        try:
            check_row_adapter(adapter, model)
        except LoadError as error:
            problem = error
        if problem is not None and choice.mode == "batched":
            raise problem
        try:
            adapter.check_kept(model)
            mergeable.append(number)
        except ConfigError:
            if problem is not None or choice.mode == "merged":
                raise
        if problem is not None:
            merged_only.append(number)
    merged = mergeable if choice.mode == "merged" else merged_only
    return AdapterModes(merged=tuple(merged), merged_only=tuple(merged_only), mergeable=tuple(mergeable))


def choose_modes(
    run: RunConfig,
    config: EngineConfig,
    adapters: Mapping[str, Adapter],
    model: ModelConfig,
    make_reader: Callable[[], RowReader],
    begun: Mapping[str, Any] | None,
    *,
    limit: int | None,
    can_count: bool,
) -> tuple[int, ...]:
    """Return `EngineConfig.merged_adapters` of a job. `begun` holds the facts of its output, which goes on as it was
    begun; None: it has none. `can_count`: whether the inputs can be read twice, by `make_reader`."""
    choice = adapter_choice(run.lora)
    if not adapters or choice.mode != "auto":
        return config.merged_adapters
    modes = find_modes(choice, list(adapters.values()), model)
    if begun is not None:
        before = str(begun.get(MERGED_FACT) or "").split(", ")
        kept = (n for n, name in enumerate(adapters, 1) if merged_fact([name]) in before and n in modes.mergeable)
        return tuple(sorted({*kept, *config.merged_adapters}))
    if run.job.order == "input" or not run.job.plan or not can_count:
        return config.merged_adapters  # rows come in an order of their own
    work = _count(make_reader(), len(adapters), limit=limit, has_answers=run.task == "generate")
    return choose_by_cost(work, config, list(adapters.values()), model, modes)


def choose_by_cost(
    work: Mapping[int, AdapterWork],
    config: EngineConfig,
    adapters: Sequence[Adapter],
    model: ModelConfig,
    modes: AdapterModes,
) -> tuple[int, ...]:
    """Return `EngineConfig.merged_adapters` of a job whose work under each adapter is known."""
    speed, gpu_bytes = _speed(config)
    mergeable = {number: adapter for number, adapter in enumerate(adapters, 1) if number in modes.mergeable}
    chosen = choose_merged(work, mergeable, model, config, speed, gpu_bytes=gpu_bytes)
    return tuple(sorted({*chosen, *config.merged_adapters}))


def describe_modes(run: RunConfig, config: EngineConfig) -> list[str]:
    """Return a line for the user on the adapters that are merged in turn; none if there are none."""
    names = tuple(adapter_choice(run.lora).named)
    merged = [names[number - 1] for number in config.merged_adapters]
    others = [name for name in names if name not in merged]
    if not merged:
        return []
    beside = f", and those of {list_some(others, 3)} run in the same steps" if others else ""
    return [f"rows of {list_some(merged, 3)} run adapter by adapter, each merged into the weights in its turn{beside}"]


def _count(reader: RowReader, num_adapters: int, *, limit: int | None, has_answers: bool) -> dict[int, AdapterWork]:
    """Count the requests of each adapter among the first rows. If there are more rows, each adapter has its share of
    the counted ones at least."""
    most = _MOST_ROWS if limit is None else min(limit, _MOST_ROWS)
    requests: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    num_rows = 0
    try:
        for rows in reader.batches():
            for row in rows:
                if isinstance(row, Job) and num_rows < most:
                    requests[row.adapter] += row.sampling.num_samples
                    length = min(row.sampling.max_tokens or _USUAL_ANSWER, _USUAL_ANSWER) if has_answers else 1
                    tokens[row.adapter] += length * row.sampling.num_samples
                num_rows += 1
            if num_rows >= most:
                break
    except ConfigError:
        pass  # a damaged file: the job answers the rows before the damage, and reports it then
    if num_rows >= _MOST_ROWS:
        mean = round(tokens.total() / max(1, requests.total()))
        least = _MOST_ROWS // (1 + num_adapters)
        for number in range(1, 1 + num_adapters):
            if requests[number] < least:
                requests[number], tokens[number] = least, least * mean
    return {
        number: AdapterWork(num_requests=count, answer_tokens=tokens[number] / count)
        for number, count in requests.items()
        if count
    }


def _speed(config: EngineConfig) -> tuple[GpuSpeed, int | None]:
    """Return the speed and the memory of the GPUs that are seen; for a CPU, or unknown GPUs, a guess."""
    if config.device == "cpu":
        return _CPU_SPEED, None
    gpus = visible_gpus()
    if isinstance(gpus, str) or not gpus:
        return gpu_speed(""), None
    return gpu_speed(gpus[0].name), gpus[0].total_bytes or None
