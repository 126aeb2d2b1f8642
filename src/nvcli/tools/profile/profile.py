"""The memory profile of a model, estimated from the configuration or measured by loading the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import MemoryUse
from nvcli.core.system.nvidia_smi import ask_for_gpus
from nvcli.engine.client import EngineClient
from nvcli.errors import CapacityError
from nvcli.models.config import ModelConfig
from nvcli.sizing import kv_cache
from nvcli.sizing.kv_cache import block_bytes, blocks_held, blocks_of_request, state_blocks, tokens_in_blocks
from nvcli.sizing.memory import estimate
from nvcli.tools.profile.advice import Advice, advise, advise_shorter, missing
from nvcli.tools.profile.lengths import FileLengths
from nvcli.worker.distributed.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes by rank and item, the capacity of the KV cache, and changes that would enlarge it."""

    model: str
    is_estimate: bool
    """Whether nothing was loaded. If so, only weights and KV blocks are exact."""
    problem: str | None
    """Why the model does not fit; None: it fits."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_cache_dtype: str
    """Data type of keys and values in the cache: `EngineConfig.kv_dtype`."""
    block_bytes: int
    """Bytes of a KV block on a rank of the first stage, which has the most layers."""
    state_blocks: int
    """KV blocks for the recurrent states of each request; 0: the model has none."""
    ranks: list[MemoryUse]
    num_blocks: int
    """KV blocks that requests can use, without the null block; the minimum over the ranks."""
    num_tokens: int
    """Tokens that the KV cache holds, in requests of full length."""
    full_length_requests: float
    """Requests of `max_model_len` that the KV cache holds."""
    longest_request: int
    """Tokens of the longest request that the KV cache holds, up to `max_model_len`."""
    lengths: FileLengths | None
    file_requests: float | None
    """Requests of the file's mean length that the KV cache holds."""
    advice: list[Advice]


def profile_from_config(
    config: EngineConfig,
    model: ModelConfig,
    name: str,
    *,
    total: int,
    lengths: FileLengths | None,
    problem: str | None = None,
) -> MemoryProfile:
    """Estimate a profile from the configuration alone, for GPUs with `total` bytes. `problem` says why the model did
    not fit; None: this is estimated too."""
    problem = problem or missing(config, model, estimate(config, model, total))
    ranks = [estimate(config, model, total, _stage_of(config, rank)) for rank in range(config.num_ranks)]
    return _profile(config, model, name, ranks, lengths, is_estimate=True, problem=problem)


def profile_by_loading(
    config: EngineConfig,
    model: ModelConfig,
    name: str,
    *,
    lengths: FileLengths | None,
    say: Callable[[str], None],
) -> MemoryProfile:
    """Measure a profile: start an engine as a run would, and run its largest batches.

    Raises what the engine raises. If a run does not fit and the GPU's size is known, the profile is estimated from the
    configuration.
    """
    client = EngineClient.start(msgspec.structs.replace(config, measure_memory=True))
    try:
        ready = client.wait_ready()
        assert ready is not None
    except CapacityError as error:
        total = gpu_memory_here() if config.device == "cuda" else None
        if total is None:
            raise
        return profile_from_config(config, model, name, total=total, lengths=lengths, problem=str(error))
    finally:
        client.close()
    for note in ready.notes:
        say(note)
    return _profile(config, model, name, ready.memory, lengths, is_estimate=False, problem=None)


def _stage_of(config: EngineConfig, rank: int) -> Stage:
    return Stage(config.stage_of(rank), config.pipeline_parallel_size)


def _profile(
    config: EngineConfig,
    model: ModelConfig,
    name: str,
    ranks: Sequence[MemoryUse],
    lengths: FileLengths | None,
    *,
    is_estimate: bool,
    problem: str | None,
) -> MemoryProfile:
    blocks = [
        use.planned["KV cache"] // block_bytes(config, model, _stage_of(config, rank)) for rank, use in enumerate(ranks)
    ]
    tightest = blocks.index(min(blocks))
    num_blocks = max(0, blocks[tightest] - 1)
    request_len = lengths.mean_blocks * config.block_size if lengths is not None else config.max_model_len
    longest_request = kv_cache.longest_request(num_blocks, config, model)
    advice = []
    if 2 <= longest_request < config.max_model_len:  # a prompt and its answer
        advice.append(advise_shorter(longest_request))
    if config.device == "cuda":
        longest = lengths.longest_total if lengths is not None else None
        advice += advise(config, model, ranks[tightest], request_len=request_len, longest=longest)
    return MemoryProfile(
        model=name,
        is_estimate=is_estimate,
        problem=problem,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_dtype,
        block_bytes=block_bytes(config, model),
        state_blocks=state_blocks(model),
        ranks=[_shown(use) for use in ranks],
        num_blocks=num_blocks,
        num_tokens=tokens_in_blocks(num_blocks, config, model),
        full_length_requests=num_blocks / blocks_of_request(config, model, config.max_model_len),
        longest_request=longest_request,
        lengths=lengths,
        file_requests=num_blocks / blocks_held(config, model, lengths.mean_blocks) if lengths is not None else None,
        advice=advice,
    )


def _shown(use: MemoryUse) -> MemoryUse:
    """Return a rank's memory with an empty KV cache where nothing is left for one."""
    planned = {item: max(0, size) for item, size in use.planned.items()}
    return msgspec.structs.replace(use, planned=planned)


def gpu_memory_here() -> int | None:
    """Return the memory of this machine's first GPU in bytes, as nvidia-smi reports it; None if it reports none."""
    gpus = ask_for_gpus().gpus.values()
    return (min(gpus, key=lambda gpu: gpu.index).total_bytes or None) if gpus else None
