"""ModelCosts: the bytes and operations that one rank's share of a model takes in a step, counted from its tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nvcli.attention.kv_layout import KVDtype, token_bytes
from nvcli.attention.spec import StateSpec
from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import DTYPE_BYTES, EMBEDDING, HEAD, StoredDtype, TensorSpec, model_tensors
from nvcli.models.layer_config import AttentionConfig, DeltaNetConfig, ExpertsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCosts:
    """Weights that are multiplied with each of a step's rows."""

    num_weights: int
    """Each takes two operations for a row."""
    num_bytes: int
    num_fp8_weights: int = 0
    """So many of them are multiplied in FP8."""

    @property
    def operations_per_row(self) -> int:
        """Operations for one row, in the time that one of the model's type takes: two in FP8 count one."""
        return 2 * self.num_weights - self.num_fp8_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """All layers' experts, of which each row is multiplied with some."""

    num_experts: int
    experts_per_token: int
    num_weights: int
    """Of all the experts."""
    num_bytes: int
    num_fp8_weights: int = 0
    """So many of them are multiplied in FP8."""

    @property
    def weights_per_token(self) -> int:
        """The weights of the experts that one row is multiplied with."""
        return self.num_weights * self.experts_per_token // self.num_experts

    @property
    def operations_per_token(self) -> int:
        """Operations for one row, as `MatrixCosts.operations_per_row` counts them."""
        fp8_weights = self.num_fp8_weights * self.experts_per_token // self.num_experts
        return 2 * self.weights_per_token - fp8_weights

    def read_bytes(self, num_rows: float) -> float:
        """The bytes of the experts that are read for so many rows: of those that at least one row has, when every row
        has any of the experts as likely as any other."""
        unread: float = (1 - self.experts_per_token / self.num_experts) ** num_rows
        return self.num_bytes * (1 - unread)


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
class StateCosts:
    """All layers that keep a recurrent state."""

    num_bytes: int
    """The states of one request. A step reads and writes them once for each of its rows."""
    flops_per_token: int
    """Operations for one token: what the state gives for its key, what is written to it, and what it gives for the
    query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What one rank's share of a stage costs."""

    layers: MatrixCosts
    lm_head: MatrixCosts
    """Nothing in a stage that is not the last."""
    attention: tuple[AttentionCosts, ...]
    experts: ExpertCosts | None = None
    states: StateCosts | None = None

    @property
    def weights_per_token(self) -> int:
        """The weights of the layers that one row is multiplied with."""
        return self.layers.num_weights + (0 if self.experts is None else self.experts.weights_per_token)

    @property
    def operations_per_token(self) -> int:
        """The operations of the layers' matrices for one row, as `MatrixCosts.operations_per_row` counts them."""
        return self.layers.operations_per_row + (0 if self.experts is None else self.experts.operations_per_token)

    def matrix_read_bytes(self, num_rows: float) -> float:
        """The weights of the layers that are read for so many rows."""
        return self.layers.num_bytes + (0 if self.experts is None else self.experts.read_bytes(num_rows))

    @property
    def state_bytes_per_row(self) -> int:
        """The recurrent states that one row of a step reads and writes."""
        return 0 if self.states is None else 2 * self.states.num_bytes

    def kv_read_bytes(self, num_tokens: float) -> float:
        """Keys and values that one decode row reads behind `num_tokens` tokens."""
        return sum(
            one.kv_bytes_per_token * (num_tokens if one.window is None else min(num_tokens, one.window))
            for one in self.attention
        )


@lru_cache(maxsize=512)  # a layout is chosen from the same few, asked for many times
def model_costs(
    model: ModelConfig,
    dtype: StoredDtype,
    *,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE,
    kv_dtype: KVDtype | None = None,
) -> ModelCosts:
    """Count one rank's share of a stage, of a model whose weights are kept in `dtype`, and keys and values in
    `kv_dtype`; None: in `dtype` too."""
    tensors = {tensor.name: tensor for tensor in model_tensors(model, dtype, stage)}
    head = tensors.get(f"{EMBEDDING if model.tie_word_embeddings else HEAD}.weight") if stage.is_last else None
    layers = [tensor for tensor in tensors.values() if tensor.part in ("attention", "MLP")]
    layers_of_stage = [model.layers[number] for number in stage.layers(model.num_layers)]
    counts = Counter(layer.attends for layer in layers_of_stage if layer.attends is not None)
    return ModelCosts(
        layers=_matrices(layers, tensor_parallel_size),
        lm_head=_matrices([] if head is None else [head], tensor_parallel_size),
        attention=tuple(
            _attention_costs(attention, num_layers, kv_dtype or dtype, tensor_parallel_size)
            for attention, num_layers in counts.items()
        ),
        experts=_expert_costs(model, list(tensors.values()), tensor_parallel_size),
        states=_state_costs([layer.attention for layer in layers_of_stage], dtype, tensor_parallel_size),
    )


def _expert_costs(model: ModelConfig, tensors: list[TensorSpec], tensor_parallel_size: int) -> ExpertCosts | None:
    """Count what one rank keeps of the experts; None where there are none."""
    experts = _matrices([tensor for tensor in tensors if tensor.is_of_experts], tensor_parallel_size)
    routings = {layer.mlp.routing for layer in model.decoder.layer_kinds if isinstance(layer.mlp, ExpertsConfig)}
    if not experts.num_weights:
        return None
    assert len(routings) == 1, "no family routes differently in different layers"
    (routing,) = routings
    return ExpertCosts(
        num_experts=routing.num_experts,
        experts_per_token=routing.experts_per_token,
        num_weights=experts.num_weights,
        num_bytes=experts.num_bytes,
        num_fp8_weights=experts.num_fp8_weights,
    )


def _state_costs(
    attentions: list[AttentionConfig | DeltaNetConfig], dtype: StoredDtype, tensor_parallel_size: int
) -> StateCosts | None:
    """Count what one rank keeps and computes in layers with a state; None where there are none."""
    num_bytes, flops = 0, 0
    for one in attentions:
        if isinstance(one, DeltaNetConfig):
            recurrent = one.recurrent_shape(tensor_parallel_size)
            spec = StateSpec(conv_shape=one.conv_shape(tensor_parallel_size), recurrent_shape=recurrent)
            num_bytes += spec.num_bytes(DTYPE_BYTES[dtype])
            flops += 3 * 2 * math.prod(recurrent)
    return StateCosts(num_bytes=num_bytes, flops_per_token=flops) if num_bytes else None


def _attention_costs(
    attention: AttentionConfig, num_layers: int, kv_dtype: KVDtype, tensor_parallel_size: int
) -> AttentionCosts:
    """Count what one rank computes in `num_layers` layers of one kind."""
    key_bytes = token_bytes(attention.kv_heads_per_rank(tensor_parallel_size), attention.head_dim, kv_dtype)
    query_size = attention.num_heads // tensor_parallel_size * attention.head_dim
    return AttentionCosts(
        window=attention.window,
        kv_bytes_per_token=num_layers * 2 * key_bytes,
        flops_per_pair=num_layers * 4 * query_size,
    )


def _matrices(tensors: list[TensorSpec], tensor_parallel_size: int) -> MatrixCosts:
    """Count what each of the ranks keeps of the matrices among `tensors`."""
    matrices = [tensor for tensor in tensors if len(tensor.stored_shape) == 2]
    return MatrixCosts(
        num_weights=sum(math.prod(tensor.kept_shape(tensor_parallel_size)) for tensor in matrices),
        num_bytes=sum(tensor.kept_bytes(tensor_parallel_size) for tensor in matrices),
        num_fp8_weights=sum(
            math.prod(tensor.kept_shape(tensor_parallel_size)) for tensor in matrices if tensor.scaling is not None
        ),
    )
