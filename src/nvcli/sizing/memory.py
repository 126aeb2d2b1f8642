"""Estimates a rank's memory use from configuration alone.

Weights and the KV cache's blocks are exact. The other items follow formulas whose constants were measured on an H200
(torch 2.11, Qwen3 of 0.6, 8 and 14 billion parameters); the report marks them as estimated.
"""

from __future__ import annotations

import msgspec

from nvcli.attention.choice_sizes import ChoiceSizes
from nvcli.attention.kv_layout import SCRATCH_UNIT, projected_scratch_tokens, scratch_tokens
from nvcli.attention.spec import StateSpec, attention_kinds, projected_kind
from nvcli.core.config_types import FP8_PRODUCTS
from nvcli.core.engine_config import ANSWER_TABLE_BYTES, EngineConfig
from nvcli.core.messages import MemoryUse
from nvcli.kernels.weight_formats import CONVERTED_ROWS
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.config import ModelConfig
from nvcli.models.kv_groups import kv_groups
from nvcli.models.mixers.mixer import Mixer, code_elements
from nvcli.models.tensor_spec import DTYPE_BYTES
from nvcli.sizing.adapters import AdapterMemory, adapter_memory
from nvcli.sizing.costs import activation_elements
from nvcli.sizing.graph_sizes import (
    bound_tokens_of_home,
    draft_graph_sizes,
    may_absorb,
    may_share,
    may_share_prefixes,
    step_graph_sizes,
)
from nvcli.sizing.images import image_buffer_bytes, tower_bytes
from nvcli.sizing.kv_cache import block_bytes, max_blocks
from nvcli.sizing.memory_plan import NeededMemory
from nvcli.sizing.weights import rank_weights
from nvcli.worker.distributed.stage import Stage

_CONTEXT_BYTES = 800_000_000
"""CUDA context, libraries and loaded kernels of one process."""
_COLLECTIVES_BYTES = 500_000_000
"""NCCL's buffers, with more than one rank."""
_WORKSPACE_BYTES = 70_000_000
"""Workspaces of the matrix libraries."""
_BYTES_PER_GRAPH = 1_500_000
_DRAFTS_SHARE, _DRAFTS_SHARE_OF_HEAD = 0.02, 0.05
"""Share of a GPU's memory after weights that the logits and graphs of steps with drafts take at most: the KV cache then
holds nearly as many requests as without, whether or not drafts turn out to be right. A head is asked for, and may draft
for more rows."""
_MAX_SHARED_SUM_BYTES = 80 << 20
"""The largest part of a sum through shared memory on one rank. There are four such buffers, which come out of the KV
cache."""
_NUM_SHARED_SUM_BUFFERS = 4


def estimate(config: EngineConfig, model: ModelConfig, total: int, stage: Stage | None = None) -> MemoryUse:
    """Plan the memory of one rank of a stage, on a GPU of `total` bytes.

    The KV cache is negative if the rest does not fit. `stage` None: the largest need of any stage's ranks.
    """
    weights = rank_weights(config, model, stage)
    samples = stage is None or stage.is_last
    tower = model.vision if model.has_tower and (stage is None or stage.is_first) else None
    budget = int(total * config.gpu_memory_utilization)
    config = with_affordable_drafts(config, model, budget - sum(weights.values()))
    needed = NeededMemory(
        weights=sum(weights.values()),
        adapters=planned_adapters(config, model, total, stage).device_bytes,
        buffers=_buffers(config, model, total, stage),
        activations=max(
            _activations(config, model, config.max_num_batched_tokens),
            _sampling(config, model) if samples else 0,
            0 if tower is None else tower_bytes(config, tower),
        ),
        graphs=0 if config.enforce_eager else _graphs(config, model, samples=samples),
        other=_other(config),
    )
    left = budget - needed.total if config.kv_cache_memory is None else config.kv_cache_memory
    one_block = block_bytes(config, model, stage)
    kv_cache = min(left // one_block, max_blocks(config, model)) * one_block if left > 0 else left
    return MemoryUse(device="a GPU", total=total, budget=budget, weights=dict(weights), planned=needed.items(kv_cache))


def cache_room(config: EngineConfig, planned: MemoryUse, held: int) -> int:
    """Return the bytes for the KV cache of a rank whose memory was `planned`, where something else holds `held` bytes
    of the GPU; negative: the bytes missing."""
    beside = planned.beside_cache + held
    if config.kv_cache_memory is None:
        return planned.budget - beside
    left = planned.total - beside  # a cache of a set size is not limited by the budget
    missing = planned.planned["KV cache"] - left
    return -missing if missing > 0 else min(config.kv_cache_memory, left)


def planned_adapters(config: EngineConfig, model: ModelConfig, total: int, stage: Stage | None = None) -> AdapterMemory:
    """Plan the LoRA adapters that rows choose from, for one rank of a stage on a GPU of `total` bytes."""
    weights = sum(rank_weights(config, model, stage).values())
    free = max(0, total - weights - _buffers(config, model, total, stage) - _other(config))
    return adapter_memory(config, model, free, stage)


def _other(config: EngineConfig) -> int:
    return _CONTEXT_BYTES + (_COLLECTIVES_BYTES if config.num_ranks > 1 else 0)


def with_affordable_drafts(config: EngineConfig, model: ModelConfig, left: int) -> EngineConfig:
    """Return a configuration whose steps with drafts hold so few tokens that their logits and graphs take a small share
    of `left`, the bytes of a GPU that weights leave; but as many as one request may have."""
    if not config.max_draft_tokens:
        return config
    tokens, least = config.max_draft_step_tokens, 1 + config.max_draft_tokens
    share = _DRAFTS_SHARE if model.draft_head is None else _DRAFTS_SHARE_OF_HEAD
    while tokens > least and _draft_bytes(config, model) > left * share:
        tokens = max(least, tokens * 3 // 4)
        config = msgspec.structs.replace(config, draft_step_tokens=tokens)
    return config


def _draft_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return what drafts take: logits, in graphs and beside them, and graphs."""
    logits = 2 * config.max_draft_step_tokens * _logits_bytes(config, model)
    return logits + _num_draft_graphs(config) * _BYTES_PER_GRAPH


def shared_sum_rows(max_num_batched_tokens: int, row_bytes: int) -> int:
    """Return the most rows of a sum that goes through memory shared by the ranks.

    A row has `row_bytes` (hidden size × element size). Sums of more rows go through the process group.
    """
    return max(1, min(max_num_batched_tokens, _MAX_SHARED_SUM_BYTES // row_bytes))


def _activations(config: EngineConfig, model: ModelConfig, num_tokens: int) -> int:
    """Return the peak of a batch of all homes' rows, in attention or in the MLP. Gate and up are multiplied in one
    kernel; without it they take three times as much."""
    hidden = model.hidden_size
    elements = activation_elements(model, config.tensor_parallel_size)
    # Attention by rows has a home's rows, and the residual stream of the others is elsewhere.
    most = max(
        ceil_div(count, config.num_homes) if isinstance(block, Mixer) else count for block, count in elements.items()
    )
    if model.quantization in FP8_PRODUCTS or (model.has_fp8_beside and model.quantization != "none"):
        most += code_elements(hidden)
    most += model.decoder.has_shortcuts * hidden  # the result that waits for the next layer
    most += (model.decoder.num_streams - 1) * hidden
    most += model.decoder.has_loops * 2 * hidden  # the stream before them, and its sum with the stream
    most += model.decoder.keeps_embeddings * 5 * hidden  # they, the stream beside them, and two copies of it
    if model.decoder.altup is not None:
        most += 4 * hidden  # the first stream as changed, its norm, attention's result, and what is still to be added
    if model.decoder.streams is not None and model.decoder.streams.gate_rank:  # streams, their norms, and gates
        most = max(most, (3 * model.decoder.num_streams + 1) * hidden)
    inputs = model.decoder.layer_inputs
    if inputs is not None:  # those of all layers live through the pass; making them takes four times as much
        width = model.num_layers * inputs.size
        most = max(most + width, 4 * width + model.hidden_size)
    angles = model.decoder.angles_per_position * 4  # cos and sin in float32
    return num_tokens * (most * DTYPE_BYTES[config.dtype] + angles) + _widened_bytes(config, model)


def _widened_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the size of the largest layer's 4-bit weight in the model's own type, in which it is multiplied by many
    tokens, or of the LM head's part for which that is done at a time."""
    if model.quantization != "w4a16" or model.stored_groups.kind == "mxfp4":
        return 0
    size = config.tensor_parallel_size
    blocks = [block for layer in model.decoder.layer_kinds for block in layer.blocks]
    most = max(sum(piece.fused_rows for piece in block.pieces(model.ranks(size, block))) for block in blocks)
    if model.keeps_head:
        most = max(most, min(ceil_div(model.vocab_size, size), CONVERTED_ROWS))
    return most * model.hidden_size * DTYPE_BYTES[config.dtype]


def _sampling(config: EngineConfig, model: ModelConfig) -> int:
    """Return the size of all rows' logits, and of those of a head that drafts beside them."""
    of_head = config.max_padded_rows if model.draft_head is not None else 0
    return (config.max_step_logits + of_head) * _logits_bytes(config, model)


def _logits_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the size of a token's logits, in the model's dtype and in float32."""
    return model.vocab_size * (DTYPE_BYTES[config.dtype] + 4)


def _graphs(config: EngineConfig, model: ModelConfig, *, samples: bool) -> int:
    """Return the size of all graphs: they share the memory of the largest, and each needs a little of its own. Logits
    fit into larger activations. Graphs of steps that share segments or prefixes count, because memory is set aside for
    them."""
    sizes = step_graph_sizes(config.of_home, model)
    decode_rows, _, prefill_tokens = sizes[0]
    activations = _activations(config, model, config.num_homes * (decode_rows + prefill_tokens))
    sampling = _sampling(config, model) if samples else 0
    shared = activations if activations > sampling else activations + sampling
    most_tokens = bound_tokens_of_home(config, model)
    of_head = [size for size in sizes if size[1]] if model.draft_head is not None else []  # and those without it
    num_graphs = sum(
        (1 + may_share(size[0], config.max_shared_rows))
        * (1 + may_share_prefixes(size, config.max_shared_rows, most_tokens))
        for size in (*sizes, *of_head)
    )
    if _projected_row_bytes(config, model):  # steps whose chunks are attended without projecting latents
        stages = config.pipeline_parallel_size
        num_graphs += sum(
            1 + (stages > 1 and may_share(size[0], config.max_shared_rows))
            for size in (*sizes, *of_head)
            if may_absorb(size[2], stages, most_tokens)
        )
    num_graphs += _num_draft_graphs(config)
    if config.placed_adapters:  # steps with adapters and steps without them
        num_graphs *= 2
    return shared + num_graphs * _BYTES_PER_GRAPH


def _num_draft_graphs(config: EngineConfig) -> int:
    most_shared = config.max_shared_rows
    return sum(1 + may_share(rows, most_shared) for rows, *_ in draft_graph_sizes(config, config.draft_widths))


def _buffers(config: EngineConfig, model: ModelConfig, total: int, stage: Stage | None) -> int:
    """Return the size of the slot table with its block tables, the table of answers to draft from, what recurrent
    states keep of drafts, the rotary table, workspaces, copies of keys and the embeddings of images; with several
    ranks, of the buffers for sums; and with stages, of one buffer to receive and one to send."""
    tokens = (config.max_num_seqs + 1) * config.max_row_tokens * 4
    tables = len(kv_groups(model)) * (config.max_num_seqs + 1) * config.max_blocks_per_seq * 4
    row_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
    sums = 0
    if config.tensor_parallel_size > 1 and not config.enable_attention_dp:
        sums = _NUM_SHARED_SUM_BUFFERS * shared_sum_rows(config.max_num_batched_tokens, row_bytes) * row_bytes
    ends = 2 - stage.is_first - stage.is_last if stage is not None else min(2, config.pipeline_parallel_size - 1)
    num_streams = model.decoder.num_streams
    tensors = num_streams if config.tensor_parallel_size == 1 or num_streams > 1 else 2
    links = ends * tensors * config.max_padded_tokens * row_bytes
    angles = config.max_model_len * model.decoder.angles_per_position * 4
    drafts = 0
    if config.max_draft_tokens and config.pipeline_parallel_size == 1:
        drafts = ANSWER_TABLE_BYTES + _kept_states(config, model)
        drafts += config.max_num_seqs * row_bytes if model.draft_head is not None else 0
    if model.has_tower and model.vision is not None and (stage is None or stage.is_first):
        tables += image_buffer_bytes(config, model.vision, total)
    scratch = _prefill_scratch(config, model)
    size = model.attention_ranks(config.tensor_parallel_size)
    kinds = attention_kinds(mixer.kv_spec(size) for of_layer in model.mixers for mixer in of_layer)
    if any(spec.is_beside_backends for spec in kinds):
        scratch += ChoiceSizes.of(kinds, config.max_row_tokens).num_bytes(config.of_home.max_padded_tokens)
    return tokens + tables + drafts + sums + links + angles + scratch + _WORKSPACE_BYTES


def _kept_states(config: EngineConfig, model: ModelConfig) -> int:
    """Return the size of `attention.kept_states.KeptStates`."""
    size = model.attention_ranks(config.tensor_parallel_size)
    specs = [mixer.kv_spec(size) for layer in model.layers for mixer in layer.mixers]
    sizes = DTYPE_BYTES[config.dtype], config.max_draft_step_tokens
    return sum(spec.kept_bytes(*sizes) for spec in specs if isinstance(spec, StateSpec))


def _projected_row_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of a token in the scratch of `kernels/triton/attention/projected_prefill.py`; 0: there is none,
    as on GPUs other than Hopper's, which have so much more room than planned."""
    takes = config.dtype != "float32" and config.attention_backend in ("auto", "triton")
    takes = takes and (config.kv_dtype == config.dtype or (config.kv_dtype, config.dtype) == ("fp8", "bfloat16"))
    if not takes or config.batch_invariant or config.block_size % SCRATCH_UNIT:
        return 0
    size, kinds_of_layers = model.attention_ranks(config.tensor_parallel_size), model.decoder.layer_kinds
    spec = projected_kind(mixer.kv_spec(size) for layer in kinds_of_layers for mixer in layer.mixers)
    return 0 if spec is None else spec.projected_size() * DTYPE_BYTES[config.dtype]


def _prefill_scratch(config: EngineConfig, model: ModelConfig) -> int:
    """Return the size of what the kernel for Hopper GPUs attends to in place of the cache: bfloat16 copies of FP8 keys
    and values, or what latents are projected to, if `kernels/triton/attention/prefill_choice.py` chooses it. Other GPUs
    do not have it, and so have this much more room than planned."""
    backend = config.attention_backend.partition(":")[0]
    if row_bytes := _projected_row_bytes(config, model):
        most_tokens = config.of_home.max_num_batched_tokens
        top_k = model.most_chosen or None
        return row_bytes * projected_scratch_tokens(config.max_model_len, most_tokens, row_bytes, top_k)
    takes = config.kv_dtype == "fp8" and config.dtype == "bfloat16" and backend in ("auto", "triton")
    if not takes or config.batch_invariant or config.block_size % SCRATCH_UNIT:
        return 0
    size, kinds_of_layers = model.attention_ranks(config.tensor_parallel_size), model.decoder.layer_kinds
    specs = [mixer.kv_spec(size) for layer in kinds_of_layers for mixer in layer.mixers]
    kinds = attention_kinds(specs)
    shapes = {spec.geometry[1:] for spec in kinds}
    if len(shapes) > 1 or any(spec.is_state for spec in specs):
        return 0
    if not any(spec.window is None and spec.head_dim in (64, 128) for spec in kinds):
        return 0
    elements = max(num_heads * head_dim for num_heads, head_dim, _, _ in shapes)
    num_tokens = scratch_tokens(config.max_model_len, config.of_home.max_padded_rows)
    return 2 * num_tokens * elements * DTYPE_BYTES[config.dtype]
