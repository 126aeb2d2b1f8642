"""How many replicas of a model run (dp), each on how many GPUs (tp): chosen for the shortest time of one job.

`choose_layout` is a function of its arguments alone. A layout must fit by `sizing.memory`, with what other programs
hold of each GPU left out; one whose KV cache holds a request of `max_model_len` goes before one that does not. Among
these the layout with the least seconds is chosen. Its time is worked out for one replica and added up over replicas:

    decode step     matrices: the longer of reading every weight and multiplying with it; reading each request's keys
                    and values; a fixed time for each layer and for each request; tp > 1: two all-reduces for each
                    layer. With stages: all of them work at a time, each on a share of the requests
    requests a step no more than `max_num_seqs`, the replica's share of the job, and what the KV cache holds. Answers
                    are of all lengths up to twice the usual one: the last to run end one by one, in ever smaller steps
    prompts         matrix time and all-reduces
    start           each process, each replica's weights, and NCCL: what makes many replicas too much for a small job

Lengths are not known before the job is read: requests are taken to have `_USUAL_TOKENS` of prompt and of answer. The
constants were read off H200s; what counts are their ratios. Pipeline stages are taken where they are asked for, and
never chosen: between GPUs with fast links tensor parallelism reads the weights once where stages read theirs for each
micro-batch, and between others nothing has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from nvcli.config import EngineConfig, ParallelSize, format_bytes
from nvcli.distributed.stage import Stage
from nvcli.errors import CapacityError, ConfigError
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import DTYPE_BYTES
from nvcli.nvidia_smi import SmiGpu
from nvcli.sizing.costs import model_costs
from nvcli.sizing.kv_cache import block_bytes, tokens_in
from nvcli.sizing.memory import estimate
from nvcli.sizing.weights import largest_stage, weight_bytes

_USUAL_TOKENS = 512
_LARGE_JOB = 64
"""A job of unknown size is taken to have this many times the requests that the machine can run at a time."""
_LEFT = (0.875, 0.625, 0.375, 0.125)
"""The share of the last requests that still run, in each quarter of the time that they take to end."""
_LAYER_SECONDS = 30e-6
"""The time that each layer adds to a decode step: small kernels and the gaps between them."""
_PIECE_LOSS = 0.03
"""The share by which operations get slower with each halving of the matrices."""
_ROW_SECONDS = 3e-6
"""The time that each request adds to a decode step: the sampler, and prompts that share the step."""
_PROCESS_SECONDS = 0.2
_LOAD_BYTES_PER_SECOND = 40e9
"""The speed at which all replicas together load weights from the page cache."""
_NCCL_SECONDS = 1.5
_ESTIMATE_ERROR = 0.02
"""The estimate's error as a share of a GPU's memory: where less is missing, the ranks are left to find out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The numbers of replicas (dp), of stages (pp) and of ranks in each stage (tp), and the GPUs they use."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int
    gpus: tuple[int, ...] = ()
    """The GPUs to use, as `EngineConfig.gpus` has them; empty: the first ones."""
    why: str = ""
    """One line for the user; empty where nothing was chosen."""

    def apply(self, config: EngineConfig) -> EngineConfig:
        return msgspec.structs.replace(config, tensor_parallel_size=self.tensor_parallel_size, gpus=self.gpus)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def flags(self) -> str:
        stages = f" --pp {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        return f"--dp {self.data_parallel_size}{stages} --tp {self.tensor_parallel_size}"


def choose_layout(
    gpus: Sequence[SmiGpu],
    model: ModelConfig,
    config: EngineConfig,
    *,
    num_requests: int | None,
    tensor_parallel_size: ParallelSize = "auto",
    data_parallel_size: ParallelSize = "auto",
) -> Layout:
    """Choose the layout that finishes the job soonest.

    `gpus` are those that a process sees, in its order. `num_requests` is the size of the job; None: many. The number of
    stages in `config` is kept, and its tensor-parallel size is not looked at. Raises ConfigError where there are too
    few GPUs for the sizes that are given, and CapacityError with the itemised plan where the model fits nowhere.
    """
    known_requests = num_requests
    if num_requests is None:
        num_requests = _LARGE_JOB * config.max_num_seqs * len(gpus)
    pp = config.pipeline_parallel_size
    sizes = list(_sizes(len(gpus) // pp, model, num_requests, tensor_parallel_size, data_parallel_size))
    if not sizes:
        given = {
            "tensor_parallel_size (--tp)": tensor_parallel_size,
            "data_parallel_size (--dp)": data_parallel_size,
            "pipeline_parallel_size (--pp)": pp if pp > 1 else "auto",
        }
        shown = " and ".join(f"{key} is {size}" for key, size in given.items() if size != "auto")
        raise ConfigError(
            f"{shown}, and {len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'} can be seen here: lower it, or "
            "look at CUDA_VISIBLE_DEVICES"
        )
    candidates = [_candidate(gpus, model, config, tp, dp, num_requests) for tp, dp in sizes]
    fitting = [one for one in candidates if one.num_tokens > 0]
    if not fitting:
        fitting = [_nearest(candidates, gpus, model, config)]
    best = min(fitting, key=lambda one: (one.num_tokens < config.max_model_len, one.seconds, one.num_gpus))
    return Layout(
        tensor_parallel_size=best.tp,
        pipeline_parallel_size=best.pp,
        data_parallel_size=best.dp,
        gpus=() if best.gpus == tuple(range(best.num_gpus)) else best.gpus,
        why=_explain(best, fitting, len(gpus), known_requests, config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    tp: int
    pp: int
    dp: int
    gpus: tuple[int, ...]
    weight_bytes: int
    """Bytes of weights on one GPU."""
    room: int
    """Bytes for the KV cache of the rank that has least room; negative: so many are missing."""
    num_tokens: int
    """Tokens that the KV cache of the replica with least room holds; 0: the model does not fit."""
    seconds: float
    """The estimated time of the job, start-up included."""

    @property
    def num_gpus(self) -> int:
        return self.gpus_each * self.dp

    @property
    def gpus_each(self) -> int:
        """The number of GPUs of each replica."""
        return self.pp * self.tp

    @property
    def flags(self) -> str:
        return Layout(tensor_parallel_size=self.tp, pipeline_parallel_size=self.pp, data_parallel_size=self.dp).flags


def _sizes(
    num_gpus: int, model: ModelConfig, num_requests: int, tp_given: ParallelSize, dp_given: ParallelSize
) -> Iterator[tuple[int, int]]:
    """Yield every (tp, dp) that the model and the GPUs allow, with no more replicas than requests.

    `num_gpus` is the number of GPUs for each pipeline stage.
    """
    for tp in range(1, num_gpus + 1) if tp_given == "auto" else [tp_given]:
        if not model.divides_by(tp):
            continue
        most = min(num_gpus // tp, max(1, num_requests))
        for dp in range(1, most + 1) if dp_given == "auto" else [dp_given]:
            if tp * dp <= num_gpus:
                yield tp, dp


def _candidate(
    gpus: Sequence[SmiGpu],
    model: ModelConfig,
    config: EngineConfig,
    tp: int,
    dp: int,
    num_requests: int,
) -> _Candidate:
    config = msgspec.structs.replace(config, tensor_parallel_size=tp, gpus=())
    each = config.num_ranks
    stage = largest_stage(model, config.pipeline_parallel_size)
    weights = sum(weight_bytes(model, config.dtype, tensor_parallel_size=tp, stage=stage).values())
    rooms = [_room(gpu, model, config) for gpu in gpus]
    # The GPUs with most room are taken; neighbours share a replica.
    chosen = sorted(sorted(range(len(gpus)), key=lambda index: -rooms[index])[: each * dp])
    share = math.ceil(num_requests / dp)
    rate, least_tokens = 0.0, None
    for first in range(0, each * dp, each):
        group = chosen[first : first + each]
        num_tokens = tokens_in(min(rooms[index] for index in group), config, model)
        least_tokens = num_tokens if least_tokens is None else min(least_tokens, num_tokens)
        speeds = [_speed(gpus[index].name) for index in group]
        slowest = min(speeds, key=lambda speed: speed.bytes_per_second)
        if num_tokens:
            rate += share / _replica_seconds(model, config, slowest, share, num_tokens)
    start = (each * dp - 1) * _PROCESS_SECONDS + (dp - 1) * each * weights / _LOAD_BYTES_PER_SECOND
    if each > 1:
        start += _NCCL_SECONDS
    return _Candidate(
        tp=tp,
        pp=config.pipeline_parallel_size,
        dp=dp,
        gpus=tuple(chosen),
        weight_bytes=weights,
        room=min(rooms[index] for index in chosen),
        num_tokens=least_tokens or 0,
        seconds=start + (num_requests / rate if rate else math.inf),
    )


def _room(gpu: SmiGpu, model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes that a rank's KV cache could have on this GPU; negative: so many are missing."""
    plan = estimate(config, model, gpu.total_bytes)
    fixed = plan.beside_cache + gpu.used_bytes
    if config.kv_cache_memory is None:
        return plan.budget - fixed
    left = gpu.total_bytes - fixed
    return config.kv_cache_memory if config.kv_cache_memory <= left else left - config.kv_cache_memory


def _replica_seconds(
    model: ModelConfig, config: EngineConfig, speed: _Speed, num_requests: int, num_tokens: int
) -> float:
    """Return the seconds that one replica takes for its share of the job."""
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    stage = largest_stage(model, pp)
    num_layers = len(stage.layers(model.num_layers))
    usual = max(1, min(_USUAL_TOKENS, config.max_model_len // 4))
    running = max(1.0, min(config.max_num_seqs, num_requests, num_tokens / (2 * usual)))
    costs = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=stage)
    head = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=Stage(pp - 1, pp)).lm_head
    weights = costs.weights_per_token + head.num_weights
    row_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
    kv_bytes = costs.kv_read_bytes(1.5 * usual)

    flops = speed.flops_per_second / (1 + _PIECE_LOSS * math.log2(tp))

    def step(rows: float) -> float:
        matrix_bytes = costs.matrix_read_bytes(rows) + head.num_bytes
        seconds = max(matrix_bytes / speed.bytes_per_second, 2 * weights * rows / flops)
        seconds += rows * (kv_bytes / speed.bytes_per_second + _ROW_SECONDS)
        return seconds + num_layers * (_LAYER_SECONDS + 2 * speed.all_reduce_seconds(tp, rows * row_bytes))

    steps = usual * (num_requests / running - 1) * step(max(1.0, running / pp))
    steps += 2 * usual / len(_LEFT) * sum(step(max(1.0, left * running / pp)) for left in _LEFT)
    prompt_tokens = num_requests * usual
    prompts = 2 * costs.weights_per_token * prompt_tokens / flops
    prompts += 2 * num_layers * speed.all_reduce_seconds(tp, prompt_tokens * row_bytes)
    return pp * steps + prompts


@dataclass(frozen=True, slots=True)
class _Speed:
    """Roughly what a kind of GPU can do."""

    bytes_per_second: float
    """The speed of its memory."""
    flops_per_second: float
    """The speed of dense matrix products with 16 bits."""
    link_bytes_per_second: float
    """The speed of its links to other GPUs."""
    link_seconds: float
    """The least time that an all-reduce between two GPUs takes."""

    def all_reduce_seconds(self, num_ranks: int, num_bytes: float) -> float:
        if num_ranks == 1:
            return 0.0
        steps = math.log2(num_ranks)
        return steps * self.link_seconds + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.link_bytes_per_second


_NVLINK = {"link_bytes_per_second": 380e9, "link_seconds": 2e-6}
_PCIE = {"link_bytes_per_second": 15e9, "link_seconds": 30e-6}
_SPEEDS = {
    "B200": _Speed(6.5e12, 1400e12, **_NVLINK),
    "H200": _Speed(4.3e12, 600e12, **_NVLINK),
    "H100": _Speed(2.9e12, 600e12, **_NVLINK),
    "A100": _Speed(1.6e12, 250e12, **_NVLINK),
    "L40": _Speed(0.75e12, 200e12, **_PCIE),
}
"""The speeds of known GPUs, by a part of their name."""
_OTHER_SPEED = _Speed(0.75e12, 130e12, **_PCIE)


def _speed(name: str) -> _Speed:
    return next((speed for part, speed in _SPEEDS.items() if part in name), _OTHER_SPEED)


def _nearest(
    candidates: Sequence[_Candidate], gpus: Sequence[SmiGpu], model: ModelConfig, config: EngineConfig
) -> _Candidate:
    """Return the layout that misses least memory, where that may be an error of the estimate.

    Raises CapacityError where more is missing.
    """
    nearest = max(candidates, key=lambda one: (one.room, -one.num_gpus))
    config = msgspec.structs.replace(config, tensor_parallel_size=nearest.tp, gpus=())
    worst = min((gpus[index] for index in nearest.gpus), key=lambda gpu: _room(gpu, model, config))
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
    of = f"{len(gpus)} GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    raise CapacityError(
        f"the model does not fit the {of} that can be seen; {nearest.flags} comes nearest: of each GPU's "
        f"{format_bytes(worst.total_bytes)} the budget is {format_bytes(plan.budget)}, and it needs "
        f"{', '.join(items)}: {format_bytes(short)} are missing. To make it fit: free the GPUs, use more or larger "
        f"ones, {setting}, or lower max_num_batched_tokens; --tp and --dp in numbers skip this estimate"
    )


def _explain(
    best: _Candidate, fitting: Sequence[_Candidate], num_gpus: int, num_requests: int | None, config: EngineConfig
) -> str:
    copies = "1 copy" if best.dp == 1 else f"{best.dp} copies"
    each = "on" if best.dp == 1 else "each on"
    which = f" (GPU {', '.join(map(str, best.gpus))})" if best.gpus != tuple(range(best.num_gpus)) else ""
    text = (
        f"{best.flags}: {copies} of the model, {each} {best.gpus_each} of {num_gpus} "
        f"GPU{'s' if num_gpus > 1 else ''}{which}; "
        f"weights take {format_bytes(best.weight_bytes)} of a GPU, KV cache for about {best.num_tokens:,} tokens a copy"
    )
    others = [one for one in fitting if one is not best]
    if not others:
        return text
    longest = config.max_model_len
    held = [one for one in others if one.num_tokens >= longest]
    if best.num_tokens >= longest and not held:
        return f"{text}; no other choice holds a request of {longest:,} tokens"
    job = "this job" if num_requests is None else f"{num_requests:,} request{'s' if num_requests > 1 else ''}"
    second = min(held or others, key=lambda one: one.seconds)
    ratio = second.seconds / best.seconds
    times = f"{ratio:.1f} times as long" if ratio >= 1.05 else "as long"
    return f"{text}; for {job} {second.flags} would take about {times}"
