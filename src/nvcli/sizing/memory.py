"""What a rank's memory would go to, from configuration alone: no GPU, no weights, no torch.

Weights and the KV cache's blocks are exact. The other items follow formulas whose constants were read off an H200
(torch 2.11, Qwen3 of 0.6, 8 and 14 billion parameters); the report marks them as estimated.
"""

from __future__ import annotations

from nvcli.config import DTYPE_BYTES, EngineConfig
from nvcli.distributed.stage import Stage
from nvcli.messages import MemoryUse
from nvcli.models.config import ModelConfig
from nvcli.sizing.graph_sizes import graph_sizes, launch_bound_tokens
from nvcli.sizing.weights import kv_bytes_per_token, rows_of_shared_sums, weight_elements

_CONTEXT_BYTES = 800_000_000
"""CUDA context, libraries and loaded kernels of one process."""
_COLLECTIVES_BYTES = 500_000_000
"""NCCL's buffers, where there is more than one rank."""
_WORKSPACE_BYTES = 70_000_000
"""Of matrix libraries."""
_BYTES_PER_GRAPH = 5_000_000


def largest_stage(config: EngineConfig, model: ModelConfig) -> Stage:
    """The pipeline stage with the most weights; with one stage, that one."""
    stages = [Stage(index, config.pipeline_parallel_size) for index in range(config.pipeline_parallel_size)]
    return max(stages, key=lambda stage: sum(weight_elements(model, stage=stage).values()))


def block_bytes(config: EngineConfig, model: ModelConfig, stage: Stage | None = None) -> int:
    """Of one KV block on one rank of a stage; None: of the first, which has the most layers."""
    per_token = kv_bytes_per_token(
        model,
        tensor_parallel_size=config.tensor_parallel_size,
        bytes_per_element=DTYPE_BYTES[config.dtype],
        stage=stage or Stage(0, config.pipeline_parallel_size),
    )
    return per_token * config.block_size


def tokens_in(room: int, config: EngineConfig, model: ModelConfig) -> int:
    """That a KV cache of `room` bytes a rank holds; there is no use for more than all running requests could fill."""
    most = config.max_num_seqs * config.max_blocks_per_seq
    return min(max(0, room // block_bytes(config, model) - 1), most) * config.block_size


def estimate(config: EngineConfig, model: ModelConfig, total: int, stage: Stage | None = None) -> MemoryUse:
    """The plan of one rank of a stage, on a GPU of `total` bytes; the KV cache is negative where the rest does not fit.

    None: the most that a rank of any stage needs.
    """
    tp, size = config.tensor_parallel_size, DTYPE_BYTES[config.dtype]
    elements = weight_elements(model, tensor_parallel_size=tp, stage=stage or largest_stage(config, model))
    groups = {name: count * size for name, count in elements.items()}
    samples = stage is None or stage.is_last
    budget = int(total * config.gpu_memory_utilization)
    fixed = {
        "weights": sum(groups.values()),
        "buffers": _buffers(config, model, stage),
        "activations": max(
            _activations(config, model, config.max_num_batched_tokens), _sampling(config, model) if samples else 0
        ),
        "CUDA graphs": 0 if config.enforce_eager else _graphs(config, model, samples=samples),
        "other": _CONTEXT_BYTES + (_COLLECTIVES_BYTES if config.num_ranks > 1 else 0),
    }
    left = budget - sum(fixed.values()) if config.kv_cache_memory is None else config.kv_cache_memory
    most_blocks = 1 + config.max_num_seqs * config.max_blocks_per_seq
    one_block = block_bytes(config, model, stage)
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


def _graphs(config: EngineConfig, model: ModelConfig, *, samples: bool) -> int:
    """All share the memory of the largest, and each has some of its own."""
    sizes = graph_sizes(
        max_num_seqs=config.max_num_seqs,
        max_num_decodes=config.max_num_decodes,
        max_num_batched_tokens=config.max_num_batched_tokens,
        launch_bound_tokens=launch_bound_tokens(1, 1),
    )
    logits = config.max_num_seqs * model.vocab_size * DTYPE_BYTES[config.dtype] if samples else 0
    decode_rows, _, prefill_tokens = sizes[0]
    return _activations(config, model, decode_rows + prefill_tokens) + logits + len(sizes) * _BYTES_PER_GRAPH


def _buffers(config: EngineConfig, model: ModelConfig, stage: Stage | None) -> int:
    """Slot table, block tables (three copies), rotary table, workspaces; with several ranks four buffers for sums, and
    with stages one for what comes and one for what goes."""
    tokens = (config.max_num_seqs + 1) * config.max_model_len * 4
    tables = 3 * (config.max_num_seqs + 1) * config.max_blocks_per_seq * 4
    row_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
    sums = 0
    if config.tensor_parallel_size > 1:
        sums = 4 * rows_of_shared_sums(config.max_num_batched_tokens, row_bytes) * row_bytes
    ends = 2 - stage.is_first - stage.is_last if stage is not None else min(2, config.pipeline_parallel_size - 1)
    tensors = 1 if config.tensor_parallel_size == 1 else 2
    links = ends * tensors * config.max_num_batched_tokens * row_bytes
    return tokens + tables + sums + links + config.max_model_len * model.head_dim * 4 + _WORKSPACE_BYTES
