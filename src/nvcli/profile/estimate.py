"""What a rank's memory would go to, from configuration alone: no GPU, no weights, no torch.

Weights and the KV cache's blocks are exact. The other items follow formulas whose constants were read off an H200
(torch 2.11, Qwen3 of 0.6, 8 and 14 billion parameters); the report marks them as estimated.
"""

from __future__ import annotations

from nvcli.config import DTYPE_BYTES, EngineConfig
from nvcli.messages import MemoryUse
from nvcli.models.config import ModelConfig
from nvcli.models.sizes import kv_bytes_per_token, rows_of_shared_sums, weight_elements
from nvcli.runner.graph_sizes import decode_sizes, mixed_sizes, most_captured_tokens

_CONTEXT_BYTES = 800_000_000
"""CUDA context, libraries and loaded kernels of one process."""
_COLLECTIVES_BYTES = 500_000_000
"""NCCL's buffers, where there is more than one rank."""
_WORKSPACE_BYTES = 70_000_000
"""Of matrix libraries."""
_BYTES_PER_GRAPH = 5_000_000


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Of one KV block on one rank."""
    per_token = kv_bytes_per_token(
        model, tensor_parallel_size=config.tensor_parallel_size, bytes_per_element=DTYPE_BYTES[config.dtype]
    )
    return per_token * config.block_size


def estimate(config: EngineConfig, model: ModelConfig, total: int) -> MemoryUse:
    """One rank's plan on a GPU of `total` bytes. The KV cache is negative where the rest does not fit."""
    tp, size = config.tensor_parallel_size, DTYPE_BYTES[config.dtype]
    groups = {name: count * size for name, count in weight_elements(model, tensor_parallel_size=tp).items()}
    budget = int(total * config.gpu_memory_utilization)
    fixed = {
        "weights": sum(groups.values()),
        "buffers": _buffers(config, model),
        "activations": max(_activations(config, model, config.max_num_batched_tokens), _sampling(config, model)),
        "CUDA graphs": 0 if config.enforce_eager else _graphs(config, model),
        "other": _CONTEXT_BYTES + (_COLLECTIVES_BYTES if tp > 1 else 0),
    }
    left = budget - sum(fixed.values()) if config.kv_cache_memory is None else config.kv_cache_memory
    most_blocks = 1 + config.max_num_seqs * config.max_blocks_per_seq
    one_block = block_bytes(config, model)
    kv_cache = min(left // one_block, most_blocks) * one_block if left > 0 else left
    return MemoryUse(
        device="a GPU", total=total, budget=budget, weights=groups, planned={**fixed, "KV cache": kv_cache}
    )


def _activations(config: EngineConfig, model: ModelConfig, num_tokens: int) -> int:
    """Peak of a batch: gate, up and their product; residual, norm, attention's input and output."""
    mlp = 3 * model.intermediate_size // config.tensor_parallel_size
    return num_tokens * (mlp + 4 * model.hidden_size) * DTYPE_BYTES[config.dtype]


def _sampling(config: EngineConfig, model: ModelConfig) -> int:
    """Logits of all rows in the model's dtype and in float32."""
    return config.max_num_seqs * model.vocab_size * (DTYPE_BYTES[config.dtype] + 4)


def _graphs(config: EngineConfig, model: ModelConfig) -> int:
    """All share the memory of the largest, and each has some of its own."""
    decode = decode_sizes(config.max_num_seqs)
    mixed = mixed_sizes(config.max_num_seqs, config.max_num_batched_tokens)
    most_tokens = most_captured_tokens(config.max_num_seqs, config.max_num_batched_tokens)
    logits = config.max_num_seqs * model.vocab_size * DTYPE_BYTES[config.dtype]
    return _activations(config, model, most_tokens) + logits + (len(decode) + len(mixed)) * _BYTES_PER_GRAPH


def _buffers(config: EngineConfig, model: ModelConfig) -> int:
    """Slot table, block tables (three copies), rotary table, workspaces; with several ranks four buffers for sums."""
    tokens = (config.max_num_seqs + 1) * config.max_model_len * 4
    tables = 3 * (config.max_num_seqs + 1) * config.max_blocks_per_seq * 4
    sums = 0
    if config.tensor_parallel_size > 1:
        row_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
        sums = 4 * rows_of_shared_sums(config.max_num_batched_tokens, row_bytes) * row_bytes
    return tokens + tables + sums + config.max_model_len * model.head_dim * 4 + _WORKSPACE_BYTES
