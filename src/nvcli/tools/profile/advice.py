"""Advice on memory: settings that would let more requests run or make the model fit, and the gain of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.config_types import MAX_NUM_SEQS, KeptWeights
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import MemoryUse
from nvcli.errors import ConfigError
from nvcli.models.config import ModelConfig
from nvcli.sizing.kv_cache import block_bytes, blocks_held, tokens_in
from nvcli.sizing.memory import cache_room, estimate

_MOST_ADVICE = 5
_WORTH = 1.02
"""A change that gains less than 2 % is not mentioned."""
_SMALL_STEP_TOKENS = 2048
_HIGH_UTILIZATION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change of settings, and its effect."""

    change: str
    """The change as typed on the command line."""
    tokens: int
    """Capacity of the KV cache in tokens."""
    requests: float
    """Requests that the KV cache would let run at a time."""
    why: str


CacheRoom = Callable[[EngineConfig], int]
"""Returns the bytes left for a rank's KV cache under a configuration; negative: the bytes that are missing."""


def _measured_room(config: EngineConfig, model: ModelConfig, use: MemoryUse) -> CacheRoom:
    """Return a function that tells how much room a configuration leaves for the KV cache.

    Estimates are corrected by the error of the estimate for `config`, for which `use` was measured.
    """
    error = use.beside_cache - estimate(config, model, use.total).beside_cache

    def room(candidate: EngineConfig) -> int:
        planned = estimate(candidate, model.with_quantization(candidate.quantization), use.total)
        return cache_room(candidate, planned, error)

    return room


def advise(
    config: EngineConfig, model: ModelConfig, use: MemoryUse, *, request_len: float, longest: int | None
) -> list[Advice]:
    """Return advice, the cheapest change first.

    `request_len` is the length of a typical request in tokens; `longest` is that of the longest expected one, if
    known.
    """
    room = _measured_room(config, model, use)
    now = _requests(config, model, room, request_len)
    if now >= config.max_num_seqs and room(config) > 0:
        return _more_requests(config, model, room, request_len)
    found = []
    for changes, why in _candidates(config, model, longest):
        changed = msgspec.structs.replace(config, **changes)
        size_of_request = min(request_len, changed.max_model_len)
        requests = _requests(changed, model, room, size_of_request)
        if requests >= 1 and requests > _WORTH * now:
            tokens = tokens_in(room(changed), changed, model)
            found.append(Advice(change=_typed(changes), tokens=tokens, requests=requests, why=why))
    return found[:_MOST_ADVICE]


def advise_shorter(longest_request: int) -> Advice:
    """Advise on a `max_model_len` at which one request of full length fits: the tokens of the longest request that the
    KV cache holds."""
    return Advice(
        change=f"--max-model-len {longest_request}",
        tokens=longest_request,
        requests=1.0,
        why="the longest request that fits; longer answers are cut there, longer prompts refused",
    )


def _more_requests(config: EngineConfig, model: ModelConfig, room: CacheRoom, request_len: float) -> list[Advice]:
    """Advise on `max_num_seqs`, if the KV cache has room for more requests than may run."""
    more, changes = config, {}
    while 2 * more.max_num_seqs <= MAX_NUM_SEQS:
        next_changes = {"max_num_seqs": 2 * more.max_num_seqs}
        if next_changes["max_num_seqs"] > config.max_num_batched_tokens:
            next_changes["max_num_batched_tokens"] = next_changes["max_num_seqs"]
        next_config = msgspec.structs.replace(config, **next_changes)
        if _requests(next_config, model, room, request_len) < next_config.max_num_seqs:
            break
        more, changes = next_config, next_changes
    if not changes:
        return []
    return [
        Advice(
            change=_typed(changes),
            tokens=tokens_in(room(more), more, model),
            requests=_requests(more, model, room, request_len),
            why=f"the KV cache has room for more than the {config.max_num_seqs} requests that may run",
        )
    ]


def _candidates(config: EngineConfig, model: ModelConfig, longest: int | None) -> Iterator[tuple[dict[str, Any], str]]:
    fp8 = {"kv_cache_dtype": "fp8"}, "keys and values in 8 bits; `nvcli compare-quality` says what that changes"
    if config.kv_cache_memory is not None:
        yield {"kv_cache_memory": 2 * config.kv_cache_memory}, "twice the cache"
        yield {"kv_cache_memory": None}, "what gpu_memory_utilization leaves"
        if _takes_fp8(config):
            yield fp8
        return
    if config.gpu_memory_utilization < _HIGH_UTILIZATION:
        yield {"gpu_memory_utilization": _HIGH_UTILIZATION}, "if nothing else uses the GPU"
    if config.max_num_batched_tokens > max(_SMALL_STEP_TOKENS, config.max_num_seqs):
        tokens = max(_SMALL_STEP_TOKENS, config.max_num_seqs)
        yield {"max_num_batched_tokens": tokens}, "smaller activations; prompts take more steps"
    if longest is not None and longest < config.max_model_len:
        yield {"max_model_len": longest}, "the input's longest request; smaller tables"
    if not config.enforce_eager:
        yield {"enforce_eager": True}, "no CUDA graphs; small batches get slower"
    if _takes_fp8(config):
        yield fp8
    if _can_keep("w4a16", config, model):
        yield {"quantization": "w4a16"}, "linear layers in the checkpoint's bits; large batches get slower"
    if _can_keep("fp8", config, model):
        yield {"quantization": "fp8"}, "linear layers in 8 bits; `nvcli compare-quality` says what that changes"
    for size in (2 * config.tensor_parallel_size, 4 * config.tensor_parallel_size, 8 * config.tensor_parallel_size):
        try:
            model.check_tensor_parallel(size)
        except ConfigError:
            continue
        if size * config.pipeline_parallel_size <= 8:
            yield {"tensor_parallel_size": size}, "weights and cache are spread over more GPUs"


def _takes_fp8(config: EngineConfig) -> bool:
    """Whether a run's keys and values could be kept in FP8 and are not yet."""
    has_backend = set(config.attention_backend.split(":")) <= {"auto", "triton", "torch"}
    is_possible = has_backend and not config.batch_invariant
    return config.kv_dtype != "fp8" and is_possible


def _can_keep(quantization: KeptWeights, config: EngineConfig, model: ModelConfig) -> bool:
    """Whether weights now kept in 16 bits could be kept in this format."""
    if config.batch_invariant:
        return False
    try:
        return config.quantization == "none" and model.with_quantization(quantization).divides_by(
            config.tensor_parallel_size
        )
    except ConfigError:  # the checkpoint is not in 4 bits, or it is unknown which layers stay in 16 bits
        return False


def _requests(config: EngineConfig, model: ModelConfig, room: CacheRoom, request_len: float) -> float:
    """Return the requests that the KV cache would hold, ignoring `max_num_seqs`."""
    blocks_each = blocks_held(config, model, request_len / config.block_size)
    return max(0.0, config.num_homes * (room(config) // block_bytes(config, model) - 1) / blocks_each)


def missing(config: EngineConfig, model: ModelConfig, use: MemoryUse) -> str | None:
    """Describe how much memory is missing for the KV cache; None if the plan fits."""
    smallest = 2 * block_bytes(config, model)
    if config.kv_cache_memory is None:
        short = smallest - (use.budget - use.beside_cache)
    else:
        short = smallest - config.kv_cache_memory
        if short <= 0 and (over := sum(use.planned.values()) - use.total) > 0:
            return f"{format_bytes(over)} are missing for a KV cache of the size kv_cache_memory"
    return f"{format_bytes(short)} are missing for the smallest KV cache" if short > 0 else None


def _typed(changes: Mapping[str, Any]) -> str:
    """Return the changes as command-line options."""
    return " ".join(
        f"--tp {value}"
        if key == "tensor_parallel_size"
        else f"--set {key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changes.items()
    )
