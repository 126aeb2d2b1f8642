"""How many elements a rank's weights have, from the configuration alone: torch-free, for plans made before any load.

Held to the models themselves by tests/models/test_sizes.py.
"""

from __future__ import annotations

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig

_MOST_SHARED_BYTES = 80 << 20
"""Of one rank's part of a sum that goes through memory which the ranks share: there are four buffers of it, and what
they take the KV cache loses."""
_QK_NORM_FAMILIES = {"Qwen3ForCausalLM"}


def weight_elements(model: ModelConfig, *, tensor_parallel_size: int = 1, stage: Stage = WHOLE) -> dict[str, int]:
    """Elements of one rank's parameters, by the groups of `runner.memory.weight_groups`; empty ones are left out."""
    tp, num_layers = tensor_parallel_size, len(stage.layers(model.num_layers))
    hidden, head_dim = model.hidden_size, model.head_dim
    query = model.num_heads // tp * head_dim
    key_value = 2 * kv_heads_per_rank(model, tp) * head_dim
    bias = query + key_value + hidden if model.attention_bias else 0
    qk_norm = 2 * head_dim if model.architecture in _QK_NORM_FAMILIES else 0
    is_tied = model.tie_word_embeddings and stage.is_first
    vocab_shard = -(-model.vocab_size // tp) * hidden
    groups = {
        "embeddings": vocab_shard if stage.is_first else 0,
        "attention": num_layers * (hidden * (2 * query + key_value) + bias + qk_norm),
        "MLP": num_layers * 3 * hidden * (model.intermediate_size // tp),
        "norms": (2 * num_layers + stage.is_last) * hidden,
        "LM head": 0 if not stage.is_last or is_tied else vocab_shard,
    }
    return {name: size for name, size in groups.items() if size}


def kv_heads_per_rank(model: ModelConfig, tensor_parallel_size: int) -> int:
    """With fewer KV heads than ranks, neighbouring ranks hold the same one."""
    return max(1, model.num_kv_heads // tensor_parallel_size)


def kv_bytes_per_token(
    model: ModelConfig, *, tensor_parallel_size: int, bytes_per_element: int, stage: Stage = WHOLE
) -> int:
    """Keys and values of one token on one rank, all its layers."""
    num_layers = len(stage.layers(model.num_layers))
    return 2 * num_layers * kv_heads_per_rank(model, tensor_parallel_size) * model.head_dim * bytes_per_element


def rows_of_shared_sums(max_num_batched_tokens: int, row_bytes: int) -> int:
    """Most rows of a sum that goes through memory which the ranks share; `row_bytes`: hidden size × element size."""
    return max(1, min(max_num_batched_tokens, _MOST_SHARED_BYTES // row_bytes))
