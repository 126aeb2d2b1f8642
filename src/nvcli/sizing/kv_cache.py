"""What the KV cache of a run takes and holds, from configuration alone."""

from __future__ import annotations

import bisect
import math

from nvcli.config import EngineConfig
from nvcli.distributed.stage import Stage
from nvcli.models import kv_groups
from nvcli.models.config import ModelConfig


def block_bytes(config: EngineConfig, model: ModelConfig, stage: Stage | None = None) -> int:
    """The bytes of one KV block on one rank of a stage. None stands for the first stage, which has the most layers."""
    return kv_groups.block_bytes(
        model,
        config.dtype,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        stage=stage or Stage(0, config.pipeline_parallel_size),
        kv_dtype=config.kv_dtype,
    )


def blocks_of_request(config: EngineConfig, model: ModelConfig, num_tokens: int) -> int:
    """The most KV blocks that a request of `num_tokens` holds at a time."""
    return kv_groups.blocks_needed(model, num_tokens, block_size=config.block_size, chunk=config.max_num_batched_tokens)


def longest_request(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """The most tokens of a request that `num_blocks` KV blocks hold, the null block not counted; 0: none.

    It is at most `max_model_len`. With windows a request gives blocks back, so the length is searched for.
    """

    def fits(num_tokens: int) -> bool:
        return blocks_of_request(config, model, num_tokens) <= num_blocks

    if fits(config.max_model_len):
        return config.max_model_len
    lengths = range(config.block_size, config.max_model_len, config.block_size)
    return config.block_size * bisect.bisect_left(lengths, True, key=lambda num_tokens: not fits(num_tokens))


def max_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """How many KV blocks there is a use for: those of `max_num_seqs` requests of full length, and the null block."""
    return 1 + config.max_num_seqs * blocks_of_request(config, model, config.max_model_len)


def tokens_in(room: int, config: EngineConfig, model: ModelConfig) -> int:
    """How many tokens of full-length requests a KV cache of `room` bytes on each rank holds."""
    blocks = min(room // block_bytes(config, model), max_blocks(config, model)) - 1
    return tokens_in_blocks(max(0, blocks), config, model)


def tokens_in_blocks(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """How many tokens of full-length requests fit `num_blocks` KV blocks, the null block not counted."""
    tokens_each = config.max_blocks_per_seq * config.block_size
    return num_blocks * tokens_each // blocks_of_request(config, model, config.max_model_len)


def blocks_held(config: EngineConfig, model: ModelConfig, sequence_blocks: float) -> float:
    """How many KV blocks a request holds at a time, on average, whose tokens fill `sequence_blocks` blocks."""
    whole = max(1, math.ceil(sequence_blocks))
    return max(1.0, sequence_blocks) * blocks_of_request(config, model, whole * config.block_size) / whole
