"""How many replicas of a model run (dp), each on how many GPUs (tp): chosen for the shortest time of one job.

`choose_layout` is a function of its arguments alone. A layout must fit by `sizing.memory`, with what other programs
hold of each GPU left out; one whose KV cache holds a request of `max_model_len` goes before one that does not. Among
these the layout with the least seconds is chosen. Its time is that of its replicas (`planning.job_time`) and of its
start: each process, each replica's weights, and NCCL, which make many replicas too much for a small job.

Lengths are not known before the job is read: requests are taken to have `_USUAL_TOKENS` of prompt and of answer.
`estimate_layout` is told the lengths of a job that was read. Pipeline stages are taken where they are asked for, and
never chosen: between GPUs with fast links tensor parallelism reads the weights once where stages read theirs for each
micro-batch, and between others nothing has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from nvcli.core.byte_sizes import counted, format_bytes
from nvcli.core.config import RunConfig
from nvcli.core.config_types import ParallelSize
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.nvidia_smi import SmiGpu, SmiReport, visible_gpus
from nvcli.errors import CapacityError, ConfigError
from nvcli.job.planning.job_time import Lengths, gpu_speed, replica_seconds
from nvcli.models.config import ModelConfig
from nvcli.sizing.kv_cache import block_bytes, state_blocks, state_share, tokens_in
from nvcli.sizing.memory import cache_room, estimate
from nvcli.sizing.weights import rank_weights

_USUAL_TOKENS = 512
_LARGE_JOB = 64
"""Assumed size of an unknown job, in multiples of the requests that the machine can run at a time."""
_PROCESS_SECONDS = 0.2
_LOAD_BYTES_PER_SECOND = 40e9
"""Rate at which all replicas together load weights from the page cache."""
_NCCL_SECONDS = 1.5
_ESTIMATE_ERROR = 0.02
"""Error of the estimate as a share of a GPU's memory. If less is missing, the ranks find out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of replicas (dp), stages (pp) and ranks per stage (tp), and the GPUs to use."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int
    gpus: tuple[int, ...] = ()
    """The GPUs to use, as `EngineConfig.gpus` has them; empty: the first ones."""
    why: str = ""
    """A line for the user; empty if there was no choice."""

    def apply(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of a replica, without attention by rows where a stage has one rank."""
        is_by_rows = config.enable_attention_dp and self.tensor_parallel_size > 1
        return msgspec.structs.replace(
            config,
            tensor_parallel_size=self.tensor_parallel_size,
            enable_attention_dp=is_by_rows,
            max_draft_tokens=0 if is_by_rows else config.max_draft_tokens,
            num_replicas=self.data_parallel_size,
            gpus=self.gpus,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def flags(self) -> str:
        stages = f" --pp {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        return f"--dp {self.data_parallel_size}{stages} --tp {self.tensor_parallel_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEstimate:
    """A layout, with an estimate for a job."""

    layout: Layout
    weight_bytes: int
    """Bytes of weights on one GPU."""
    room: int
    """Bytes for the KV cache of the fullest rank; negative: the bytes missing."""
    num_tokens: int
    """Tokens in the KV cache of the fullest replica; 0: the model does not fit."""
    start_seconds: float
    """Extra start-up time, compared with a single rank."""
    seconds: float
    """Time of the job once the model is loaded; infinite if it does not fit."""

    @property
    def all_seconds(self) -> float:
        return self.start_seconds + self.seconds


def choose_layout(
    gpus: Sequence[SmiGpu],
    model: ModelConfig,
    config: EngineConfig,
    *,
    num_requests: int | None,
    tensor_parallel_size: ParallelSize = "auto",
    data_parallel_size: ParallelSize = "auto",
) -> Layout:
    """Choose the layout that finishes a job soonest.

    `gpus` are those that a process sees, in its order. `num_requests` is the size of the job; None: many. The number of
    stages in `config` is kept, and its tensor-parallel size is not looked at. Raises ConfigError where there are too
    few GPUs for the sizes that are given, and CapacityError with the itemised plan where the model fits nowhere.
    """
    known_requests = num_requests
    if num_requests is None:
        num_requests = _LARGE_JOB * config.max_num_seqs * len(gpus)
    pp = config.pipeline_parallel_size
    layouts = list(_layouts(len(gpus), model, pp, num_requests, tensor_parallel_size, data_parallel_size))
    if not layouts:
        given = {
            "tensor_parallel_size (--tp)": tensor_parallel_size,
            "data_parallel_size (--dp)": data_parallel_size,
            "pipeline_parallel_size (--pp)": pp if pp > 1 else "auto",
        }
        shown = " and ".join(f"{key} is {size}" for key, size in given.items() if size != "auto")
        raise ConfigError(
            f"{shown}, and the run has {counted(len(gpus), 'GPU')}: lower it, or look at CUDA_VISIBLE_DEVICES (for "
            "estimates: at --gpus)"
        )
    usual = max(1, min(_USUAL_TOKENS, config.max_model_len // 4))
    lengths = Lengths(prompt=usual, computed=usual, answer=usual)
    candidates = [
        estimate_layout(layout, gpus, model, config, num_requests=num_requests, lengths=lengths) for layout in layouts
    ]
    fitting = [one for one in candidates if one.num_tokens > 0]
    if not fitting:
        fitting = [_nearest(candidates, gpus, model, config)]
    best = min(fitting, key=lambda one: (one.num_tokens < config.max_model_len, one.all_seconds, one.layout.num_ranks))
    taken, why = best.layout.gpus, _explain(best, fitting, len(gpus), known_requests, config, model)
    return replace(best.layout, gpus=() if taken == tuple(range(len(taken))) else taken, why=why)


def chooses_layout(run: RunConfig, config: EngineConfig) -> bool:
    """Tell whether `resolve_layout` has a choice, and so needs to know the GPUs."""
    return config.device == "cuda" and "auto" in (run.tensor_parallel_size, run.data_parallel_size)


def resolve_layout(
    run: RunConfig,
    config: EngineConfig,
    model: ModelConfig,
    *,
    num_requests: int | None = None,
    report: SmiReport | None = None,
) -> Layout:
    """Choose numbers for `tensor_parallel_size` and `data_parallel_size`; `auto` is 1 where nothing can be chosen.

    `pipeline_parallel_size` stays as it was given. `config` is what `run` comes to otherwise. `num_requests` is the
    size of the job; None: many. `report` is what nvidia-smi says; None: ask it. Raises ConfigError and CapacityError.
    """
    given = layout_as_given(run)
    if not chooses_layout(run, config):
        return given
    gpus = visible_gpus(report)
    if isinstance(gpus, str):
        return replace(given, why=f"{given.flags}: could not choose a layout: {gpus}")
    return choose_layout(
        gpus,
        model,
        config,
        num_requests=num_requests,
        tensor_parallel_size=run.tensor_parallel_size,
        data_parallel_size=run.data_parallel_size,
    )


def without_useless_auto(run: RunConfig, *, device: str, gpus: Sequence[SmiGpu] | None) -> RunConfig:
    """Return a run that asks for attention by rows with `tensor_parallel_size` 1 in place of `auto` where there are too
    few GPUs for stages of two ranks, so that it keeps what attention by rows excludes, such as images.

    `gpus` None: those that nvidia-smi shows.
    """
    if run.tensor_parallel_size != "auto":
        return run
    seen = visible_gpus() if gpus is None and device == "cuda" else gpus or []
    least = 2 * run.pipeline_parallel_size * layout_as_given(run).data_parallel_size
    if device == "cuda" and not isinstance(seen, str) and len(seen) >= least:
        return run
    return msgspec.structs.replace(run, tensor_parallel_size=1)


def layout_as_given(run: RunConfig) -> Layout:
    """Return the configured layout, with 1 for every `auto`."""
    tp, dp = run.tensor_parallel_size, run.data_parallel_size
    return Layout(
        tensor_parallel_size=1 if tp == "auto" else tp,
        pipeline_parallel_size=run.pipeline_parallel_size,
        data_parallel_size=1 if dp == "auto" else dp,
    )


def estimate_layout(
    layout: Layout,
    gpus: Sequence[SmiGpu],
    model: ModelConfig,
    config: EngineConfig,
    *,
    num_requests: int,
    lengths: Lengths,
) -> LayoutEstimate:
    """Estimate a job of these lengths on a layout, on those of the GPUs that have most room."""
    tp, dp = layout.tensor_parallel_size, layout.data_parallel_size
    config = msgspec.structs.replace(config, tensor_parallel_size=tp, gpus=())
    each = config.num_ranks
    weights = sum(rank_weights(config, model).values())
    rooms = _rooms(gpus, model, config)
    # Neighbours share a replica.
    chosen = sorted(sorted(range(len(gpus)), key=lambda index: -rooms[index])[: each * dp])
    share = math.ceil(num_requests / dp)
    rate, least_tokens = 0.0, None
    for first in range(0, each * dp, each):
        group = chosen[first : first + each]
        num_tokens = tokens_in(min(rooms[index] for index in group), config, model)
        least_tokens = num_tokens if least_tokens is None else min(least_tokens, num_tokens)
        speeds = [gpu_speed(gpus[index].name) for index in group]
        slowest = min(speeds, key=lambda speed: speed.bytes_per_second)
        if num_tokens:
            rate += share / replica_seconds(model, config, slowest, share, num_tokens, lengths)
    start = (each * dp - 1) * _PROCESS_SECONDS + (dp - 1) * each * weights / _LOAD_BYTES_PER_SECOND
    if each > 1:
        start += _NCCL_SECONDS
    return LayoutEstimate(
        layout=replace(layout, gpus=tuple(chosen)),
        weight_bytes=weights,
        room=min(rooms[index] for index in chosen),
        num_tokens=least_tokens or 0,
        start_seconds=start,
        seconds=num_requests / rate if rate else math.inf,
    )


def _layouts(
    num_gpus: int, model: ModelConfig, pp: int, num_requests: int, tp_given: ParallelSize, dp_given: ParallelSize
) -> Iterator[Layout]:
    """Yield every layout that the model and the GPUs allow, with no more replicas than requests."""
    most_ranks = num_gpus // pp
    for tp in range(1, most_ranks + 1) if tp_given == "auto" else [tp_given]:
        if not model.divides_by(tp):
            continue
        most = min(most_ranks // tp, max(1, num_requests))
        for dp in range(1, most + 1) if dp_given == "auto" else [dp_given]:
            if tp * dp <= most_ranks:
                yield Layout(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp)


def _rooms(gpus: Sequence[SmiGpu], model: ModelConfig, config: EngineConfig) -> list[int]:
    """Return the bytes available for a rank's KV cache on each GPU; negative: the bytes missing."""
    planned = {size: estimate(config, model, size) for size in {gpu.total_bytes for gpu in gpus}}
    return [cache_room(config, planned[gpu.total_bytes], gpu.used_bytes) for gpu in gpus]


def _nearest(
    candidates: Sequence[LayoutEstimate], gpus: Sequence[SmiGpu], model: ModelConfig, config: EngineConfig
) -> LayoutEstimate:
    """Return the layout that lacks the least memory, if that may be an error of the estimate.

    Raises CapacityError where more is missing.
    """
    nearest = max(candidates, key=lambda one: (one.room, -one.layout.num_ranks))
    layout = nearest.layout
    config = msgspec.structs.replace(config, tensor_parallel_size=layout.tensor_parallel_size, gpus=())
    worst = gpus[min(layout.gpus, key=_rooms(gpus, model, config).__getitem__)]
    short = 2 * block_bytes(config, model) - nearest.room
    if short < _ESTIMATE_ERROR * worst.total_bytes:
        return replace(nearest, num_tokens=0)
    plan = estimate(config, model, worst.total_bytes)
    items = [f"{name} {format_bytes(size)}" for name, size in plan.planned.items() if size and name != "KV cache"]
    setting = "raise gpu_memory_utilization"
    if config.kv_cache_memory is not None:
        setting = "lower kv_cache_memory"
        items.append(f"KV cache {format_bytes(config.kv_cache_memory)}")
    if worst.used_bytes:
        items.append(f"held by other programs and the driver {format_bytes(worst.used_bytes)}")
    raise CapacityError(
        f"the model does not fit the {counted(len(gpus), 'GPU')} that can be seen; {layout.flags} comes nearest: of "
        f"each GPU's {format_bytes(worst.total_bytes)} the budget is {format_bytes(plan.budget)}, and it needs "
        f"{', '.join(items)}: {format_bytes(short)} are missing. To make it fit: free the GPUs, use more or larger "
        f"ones, {setting}, or lower max_num_batched_tokens{_smaller_weights(config, model)}; --tp and --dp in numbers "
        "skip this estimate"
    )


def _smaller_weights(config: EngineConfig, model: ModelConfig) -> str:
    """Suggest FP8 weights and say what they would take, if they are possible and not used."""
    try:
        kept = model.with_quantization("fp8")
    except ConfigError:  # layers that are left alone cannot be told
        return ""
    if config.quantization == "fp8" or not kept.divides_by(config.tensor_parallel_size):
        return ""
    num_bytes = sum(rank_weights(config, kept).values())
    return f", or --set quantization=fp8, with which weights take {format_bytes(num_bytes)}"


def _explain(
    best: LayoutEstimate,
    fitting: Sequence[LayoutEstimate],
    num_gpus: int,
    num_requests: int | None,
    config: EngineConfig,
    model: ModelConfig,
) -> str:
    layout, dp = best.layout, best.layout.data_parallel_size
    copies, each = ("1 copy", "on") if dp == 1 else (f"{dp} copies", "each on")
    which = f" (GPU {', '.join(map(str, layout.gpus))})" if layout.gpus != tuple(range(layout.num_ranks)) else ""
    text = (
        f"{layout.flags}: {copies} of the model, {each} {layout.num_ranks // dp} of {counted(num_gpus, 'GPU')}{which}; "
        f"weights take {format_bytes(best.weight_bytes)} of a GPU, KV cache for about {best.num_tokens:,} tokens a copy"
    )
    if state_blocks(model):
        share = state_share(best.num_tokens, config, model)
        text += f", of which the recurrent states of {config.max_num_seqs:,} requests take {share:.0%}"
    others = [one for one in fitting if one is not best]
    if not others:
        return text
    longest = config.max_model_len
    held = [one for one in others if one.num_tokens >= longest]
    if best.num_tokens >= longest and not held:
        return f"{text}; no other choice holds a request of {longest:,} tokens"
    job = "this job" if num_requests is None else counted(num_requests, "request")
    second = min(held or others, key=lambda one: one.all_seconds)
    ratio = second.all_seconds / best.all_seconds
    times = f"{ratio:.1f} times as long" if ratio >= 1.05 else "as long"
    return f"{text}; for {job} {second.layout.flags} would take about {times}"
