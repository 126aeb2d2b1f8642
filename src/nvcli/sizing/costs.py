"""ModelCosts: the bytes and operations that one rank's share of a model takes in a step, counted from its tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import DTYPE_BYTES, EMBEDDING, HEAD, StoredDtype, TensorSpec, model_tensors
from nvcli.models.layer_config import AttentionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCosts:
    """Weights that are multiplied with each of a step's rows."""

    num_weights: int
    """Each takes two operations for a row."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCosts:
    """All layers that attend alike."""

    window: int | None = None
    """How many tokens a token attends to, itself included; None: all before it."""
    kv_bytes_per_token: int
    """Keys and values of one token in these layers."""
    flops_per_pair: int
    """Operations for one token and one token that it attends to, in these layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What one rank's share of a stage costs."""

    layers: MatrixCosts
    lm_head: MatrixCosts
    """Nothing in a stage that is not the last."""
    attention: tuple[AttentionCosts, ...]

    def kv_read_bytes(self, num_tokens: float) -> float:
        """Keys and values that one decode row reads behind `num_tokens` tokens."""
        return sum(
            one.kv_bytes_per_token * (num_tokens if one.window is None else min(num_tokens, one.window))
            for one in self.attention
        )


@lru_cache(maxsize=512)  # a layout is chosen from the same few, asked for many times
def model_costs(
    model: ModelConfig, dtype: StoredDtype, *, tensor_parallel_size: int = 1, stage: Stage = WHOLE
) -> ModelCosts:
    """Count one rank's share of a stage, of a model whose weights, keys and values are kept in `dtype`."""
    tensors = {tensor.name: tensor for tensor in model_tensors(model, dtype, stage)}
    head = tensors.get(f"{EMBEDDING if model.tie_word_embeddings else HEAD}.weight") if stage.is_last else None
    layers = [tensor for tensor in tensors.values() if tensor.part in ("attention", "MLP")]
    kinds = model.decoder.layer_kinds
    counts = Counter(model.decoder.kind_of_layer[number] for number in stage.layers(model.num_layers))
    return ModelCosts(
        layers=_matrices(layers, tensor_parallel_size),
        lm_head=_matrices([] if head is None else [head], tensor_parallel_size),
        attention=tuple(
            _attention_costs(kinds[kind].attention, num_layers, dtype, tensor_parallel_size)
            for kind, num_layers in counts.items()
        ),
    )


def _attention_costs(
    attention: AttentionConfig, num_layers: int, dtype: StoredDtype, tensor_parallel_size: int
) -> AttentionCosts:
    """Count what one rank computes in `num_layers` layers of one kind."""
    kv_elements = 2 * attention.kv_heads_per_rank(tensor_parallel_size) * attention.head_dim
    query_size = attention.num_heads // tensor_parallel_size * attention.head_dim
    return AttentionCosts(
        window=attention.window,
        kv_bytes_per_token=num_layers * kv_elements * DTYPE_BYTES[dtype],
        flops_per_pair=num_layers * 4 * query_size,
    )


def _matrices(tensors: list[TensorSpec], tensor_parallel_size: int) -> MatrixCosts:
    """Count what each of the ranks keeps of the matrices among `tensors`."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    return MatrixCosts(
        num_weights=sum(math.prod(tensor.kept_shape(tensor_parallel_size)) for tensor in matrices),
        num_bytes=sum(tensor.kept_bytes(tensor_parallel_size) for tensor in matrices),
    )
