"""The size and capacity of a run's KV cache, from configuration alone."""

from __future__ import annotations

import bisect
import math

from nvcli.attention.kv_layout import KVDtype
from nvcli.core.config_types import MAX_BLOCK_SIZE
from nvcli.core.engine_config import EngineConfig
from nvcli.kernels.whole_numbers import ceil_div, round_up
from nvcli.models import kv_groups
from nvcli.models.config import ModelConfig
from nvcli.models.tensor_spec import StoredDtype
from nvcli.worker.distributed.stage import Stage

DEFAULT_BLOCK_SIZE = 64
"""Kernels read keys in tiles of up to this many tokens, and find them fastest if no tile straddles two blocks."""
_FLASH_ATTN_TILE = 256
"""flash-attn 2 supports only multiples of this block size."""


def default_block_size(model: ModelConfig, dtype: StoredDtype, kv_dtype: KVDtype, attention_backend: str) -> int:
    """Return the default tokens per KV block, for a configuration that leaves it open.

    In a model with recurrent states a block is about as large as a state, so that neither keys nor states waste much of
    the pool: 192 tokens for Qwen3.5-35B-A3B. Without keys its tokens take no memory, and bound what prompts may share.
    It is the same for every layout, because prompts share whole blocks.
    """
    tile = _FLASH_ATTN_TILE if "flash-attn" in attention_backend else DEFAULT_BLOCK_SIZE
    keys, state = kv_groups.group_bytes(model, dtype, block_size=tile, kv_dtype=kv_dtype)
    return tile * min(MAX_BLOCK_SIZE // tile, max(1, round(state / keys))) if keys else tile


def block_bytes(config: EngineConfig, model: ModelConfig, stage: Stage | None = None) -> int:
    """Return the bytes of one KV block on one rank of a stage (None: the first stage, which has the most layers)."""
    return kv_groups.block_bytes(
        model,
        config.dtype,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        stage=stage or Stage(0, config.pipeline_parallel_size),
        kv_dtype=config.kv_dtype,
    )


def blocks_of_request(config: EngineConfig, model: ModelConfig, num_tokens: int) -> int:
    """Return the most KV blocks that a request of `num_tokens` holds between steps, and the fewest that it can run
    with.

    While a chunk of its prompt is computed, it takes more of them for windows if there are any free.
    """
    return kv_groups.blocks_needed(model, num_tokens, block_size=config.block_size, chunk=1)


def longest_request(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """Return the length of the longest request that fits `num_blocks` KV blocks, not counting the null block; 0: none.

    It is at most `max_model_len`. With windows a request gives blocks back, so the length is found by searching.
    """

    def fits(num_tokens: int) -> bool:
        return blocks_of_request(config, model, num_tokens) <= num_blocks

    if fits(config.max_model_len):
        return config.max_model_len
    lengths = range(config.block_size, config.max_model_len, config.block_size)
    return config.block_size * bisect.bisect_left(lengths, True, key=lambda num_tokens: not fits(num_tokens))


def max_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most KV blocks of a home that can be of use: those of its share of `max_num_seqs` full-length
    requests, and of as many that rest while adapters are merged in turn (`engine.merged_adapter`), one more state each
    if states are kept for later prompts, those that one step adds for windows, and the null block."""
    config = config.of_home
    windows = sum(group.window is not None and not group.is_state for group in kv_groups.kv_groups(model))
    of_a_step = windows * ceil_div(config.max_num_batched_tokens, config.block_size)
    most = kv_groups.blocks_needed(
        model, config.max_model_len, block_size=config.block_size, chunk=config.max_num_batched_tokens
    )
    between_steps = config.max_num_seqs * blocks_of_request(config, model, config.max_model_len)
    num_states = state_blocks(model)
    kept = config.max_num_seqs * num_states if config.enable_prefix_caching else 0
    at_rest = between_steps if config.merged_adapters and not num_states else 0
    return 1 + min(config.max_num_seqs * most, between_steps + of_a_step) + at_rest + kept


def tokens_in(room: int, config: EngineConfig, model: ModelConfig) -> int:
    """Return how many tokens of full-length requests fit a KV cache of `room` bytes per rank, in all homes."""
    blocks = min(room // block_bytes(config, model), max_blocks(config, model)) - 1
    return tokens_in_blocks(max(0, blocks), config, model)


def tokens_in_blocks(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """Return how many tokens of full-length requests fit `num_blocks` KV blocks of each home, not counting the null
    block, while `max_num_seqs` run."""
    num_homes, config = config.num_homes, config.of_home
    tokens_each = _whole_blocks(config)
    blocks_each = blocks_of_request(config, model, config.max_model_len)
    return num_homes * (min(num_blocks, config.max_num_seqs * blocks_each) * tokens_each // blocks_each)


def _whole_blocks(config: EngineConfig) -> int:
    """Return the tokens of a full-length request, rounded up to whole blocks."""
    return round_up(config.max_model_len, config.block_size)


def requests_held(num_tokens: float, config: EngineConfig, model: ModelConfig, request_len: float) -> float:
    """Return how many requests of `request_len` tokens fit a KV cache at a time, if `num_tokens` tokens of full-length
    requests do."""
    return _blocks_of_tokens(num_tokens, config, model) / blocks_held(config, model, request_len / config.block_size)


def state_share(num_tokens: float, config: EngineConfig, model: ModelConfig) -> float:
    """Return the share of such a KV cache that the recurrent states of `max_num_seqs` requests take: 0 to 1."""
    states = config.max_num_seqs * state_blocks(model)
    return min(1.0, states / max(1.0, _blocks_of_tokens(num_tokens, config, model)))


def _blocks_of_tokens(num_tokens: float, config: EngineConfig, model: ModelConfig) -> float:
    """Return the number of KV blocks that `num_tokens` tokens of full-length requests take."""
    tokens_each = _whole_blocks(config)
    return num_tokens * blocks_of_request(config, model, config.max_model_len) / tokens_each


def blocks_held(config: EngineConfig, model: ModelConfig, sequence_blocks: float) -> float:
    """Return the average number of KV blocks held at a time by a request whose tokens fill `sequence_blocks` blocks."""
    whole = max(1, math.ceil(sequence_blocks))
    states = state_blocks(model)
    keys = blocks_of_request(config, model, whole * config.block_size) - states
    return states + max(1.0, sequence_blocks) * keys / whole


def state_blocks(model: ModelConfig) -> int:
    """Return the number of KV blocks that a request's recurrent states take."""
    return sum(group.is_state for group in kv_groups.kv_groups(model))
