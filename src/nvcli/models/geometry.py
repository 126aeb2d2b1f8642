"""The tensors of a model: their names, shapes and types, how ranks share them, and what they belong to. Torch-free.

This list is the one place that says a model's shapes. The layers make their parameters from it, the loader checks a
checkpoint against it, and memory plans, limits and layouts add it up (`nvcli.sizing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Literal

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.kernels.weight_formats import FP8Scaling, StoredGroups, W4Format, scale_shape
from nvcli.models.checkpoint_layout import EXPERTS, FUSED
from nvcli.models.config import ModelConfig
from nvcli.models.layer_config import (
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LayerConfig,
    LayerInputsConfig,
    MLPConfig,
    NormConfig,
)

StoredDtype = Literal["float32", "bfloat16", "float16"]
KeptDtype = StoredDtype | Literal["float8_e4m3fn"]
DTYPE_BYTES: dict[KeptDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of one element."""

Part = Literal["embeddings", "attention", "MLP", "experts", "norms", "LM head"]
"""The items of a memory report that weights are counted under. Experts are those that a router chooses; the router
itself and an expert of all tokens belong to the MLP."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the embedding and the LM head, whose tensors may be one."""
LAYER_EMBEDDING = "model.embed_tokens_per_layer"
"""Name of the embedding that has a part for each layer."""


_LINEAR_LAYERS = (*FUSED.values(), ("o_proj",), ("down_proj",), ("out_proj",))
"""The projections of each linear layer that ranks may keep in FP8 or 4 bits. A gated delta net's input is not among
them: it fuses small projections, which make decays, with the others."""


_EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
"""The projections of an expert, which are kept in FP8 or 4 bits together."""


class Cut(Enum):
    """How the ranks of a tensor-parallel group share a tensor."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Each rank holds some of the rows of [out, in], or of a bias [out]."""
    COLUMNS = "columns"
    """Each rank holds some of the columns of [out, in]."""
    EXPERTS = "experts"
    """Each rank holds some of the experts of [experts, …], all of each."""
    VOCAB = "vocab"
    """Each rank holds some of the rows of [vocabulary, hidden], padded so that all hold equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint, or one for each expert of a layer, and what each rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    """With `is_of_experts` [experts, out, in], or for biases [experts, out]."""
    cut: Cut
    dtype: KeptDtype
    """The type in which ranks keep it. The checkpoint may have another one."""
    part: Part
    max_shards: int | None = None
    """The most pieces that it can be cut into: with more ranks, neighbours hold the same piece. None: no limit."""
    row_order: tuple[int, ...] | None = None
    """The order in which ranks keep the rows of each head (`RopeConfig.row_order`); None: that of the checkpoint."""
    offset: float = 0.0
    factor: float = 1.0
    """Ranks keep (the checkpoint's values + offset) × factor."""
    scaling: FP8Scaling | None = None
    """What shares a scale, in float32, where ranks keep the weight in FP8; None: they keep it in another type."""
    w4: StoredGroups | None = None
    """How the checkpoint has it in 4 bits, where ranks keep it so; None: they keep it in another type. `dtype` is then
    that of the values."""
    is_of_experts: bool = False
    """Whether a checkpoint has it for each expert by itself; `stored_name` says under which names."""

    def stored_name(self, expert: int | None) -> str:
        """The name in a checkpoint, of one expert's tensor where it is of experts."""
        assert self.is_of_experts == (expert is not None)
        return self.name if expert is None else self.name.replace(f".{EXPERTS}.", f".{EXPERTS}.{expert}.")

    @property
    def stored_names(self) -> Iterator[str]:
        """All its names in a checkpoint."""
        experts = range(self.shape[0]) if self.is_of_experts else (None,)
        return (self.stored_name(expert) for expert in experts)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what stands under each of the names."""
        return self.shape[1:] if self.is_of_experts else self.shape

    def shard(self, rank: int, size: int) -> tuple[slice, ...]:
        """Which part rank `rank` of `size` has. It may be empty where a vocabulary is smaller than its padding."""
        whole = tuple(slice(0, length) for length in self.shape)
        if self.cut is Cut.REPLICATED:
            return whole
        if self.cut is Cut.VOCAB:
            num_rows = self.shape[0]
            rows = -(-num_rows // size)
            return slice(min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)), *whole[1:]
        shard = rank * self._num_shards(size) // size
        length = self.kept_shape(size)[self._axis]
        part = slice(shard * length, (shard + 1) * length)
        return *whole[: self._axis], part, *whole[self._axis + 1 :]

    def kept_shape(self, size: int) -> tuple[int, ...]:
        """The shape of what each of `size` ranks keeps, padding included."""
        if self.cut is Cut.REPLICATED:
            return self.shape
        if self.cut is Cut.VOCAB:
            return -(-self.shape[0] // size), *self.shape[1:]
        length = self.shape[self._axis] // self._num_shards(size)
        return *self.shape[: self._axis], length, *self.shape[self._axis + 1 :]

    def kept_bytes(self, size: int) -> int:
        """The bytes of what each of `size` ranks keeps, padding and scales included."""
        shape = self.kept_shape(size)
        if (w4 := self.w4_format(size)) is not None:
            *outer, rows, columns = shape
            order_bytes = 4 * columns if self.w4 is not None and self.w4.has_order else 0
            return math.prod(outer) * w4.num_bytes(rows, columns) + order_bytes
        num_bytes = math.prod(shape) * DTYPE_BYTES[self.dtype]
        if self.scaling is None:
            return num_bytes
        *outer, rows, columns = shape
        num_scales = math.prod((*outer, *scale_shape(rows, columns, self.scaling)))
        return num_bytes + num_scales * DTYPE_BYTES["float32"]

    def w4_format(self, size: int) -> W4Format | None:
        """How each of `size` ranks keeps it in 4 bits; None: they keep it in another type."""
        if self.w4 is None:
            return None
        kept = self.w4.kept(self.kept_shape(size)[-1])
        assert kept is not None, "ModelConfig.check_tensor_parallel comes first"
        return kept

    @property
    def _axis(self) -> int:
        """The dimension that is cut."""
        if self.cut is Cut.EXPERTS:
            return 0
        return (self.cut is Cut.COLUMNS) + self.is_of_experts

    def _num_shards(self, size: int) -> int:
        num_shards = size if self.max_shards is None else min(size, self.max_shards)
        assert self.shape[self._axis] % num_shards == 0, "ModelConfig.check_tensor_parallel comes first"
        return num_shards


@lru_cache(maxsize=64)  # plans ask for the same few stages many times
def model_tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage = WHOLE) -> tuple[TensorSpec, ...]:
    """Every tensor that a stage of the model needs, in the order of the layers; each name once.

    With a tied LM head the last of several stages needs the embedding, as its LM head.
    """
    tensors = tuple(_tensors(config, dtype, stage))
    return tensors if config.quantization == "none" else tuple(_quantised(tensors, config))


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of tensors that a checkpoint may have and the model has no use for: projections of keys and
    values in layers that read those of others."""
    names = ("k_proj", "v_proj", "k_norm")
    shared = [number for number, layer in enumerate(config.layers) if layer.attends and layer.attends.shares_kv]
    return tuple(f"model.layers.{number}.self_attn.{name}.weight" for number in shared for name in names)


def _quantised(tensors: tuple[TensorSpec, ...], config: ModelConfig) -> Iterator[TensorSpec]:
    """Have ranks keep the weights of linear layers in FP8 or in 4 bits, but for those that the checkpoint left alone,
    and experts with biases in FP8. A layer that fuses projections keeps all of them alike, and so does a mixture of
    experts, whose weights are the only ones that MXFP4 checkpoints have in 4 bits."""
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".")
        parent, _, last = module.rpartition(".")
        layers = (_EXPERT_LAYERS,) if tensor.is_of_experts else _LINEAR_LAYERS
        fused = next((projections for projections in layers if last in projections), ())
        parts = [f"{parent}.{one}" for one in fused if f"{parent}.{one}.{kind}" in names]
        if config.quantization == "fp8":
            kept = replace(tensor, dtype="float8_e4m3fn", scaling=config.fp8_scaling)
            is_plain = tensor.is_of_experts and f"{module}.bias" in names
        else:
            kept = replace(tensor, w4=config.stored_groups)
            is_plain = config.stored_groups.kind == "mxfp4" and not tensor.is_of_experts
        if tensor.is_of_experts:  # files name each expert
            parts = [part.replace(f".{EXPERTS}.", f".{EXPERTS}.0.") for part in parts]
        if kind != "weight" or is_plain or not parts or any(map(config.leaves_alone, parts)):
            yield tensor
        else:
            yield kept


def _tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage) -> Iterator[TensorSpec]:
    decoder, hidden = config.decoder, config.hidden_size
    if stage.is_first:
        yield _matrix(EMBEDDING, (config.vocab_size, hidden), Cut.VOCAB, dtype, "embeddings")
    if decoder.layer_inputs is not None:
        yield from _layer_inputs(decoder.layer_inputs, decoder, hidden, dtype)
    layers = decoder.layers
    for number in stage.layers(config.num_layers):
        yield from _layer(f"model.layers.{number}", layers[number], config, dtype)
    if stage.is_last:
        yield _norm("model.norm", hidden, decoder.norm, dtype, factor=decoder.logit_scale)
        if not config.tie_word_embeddings:
            yield _matrix(HEAD, (config.vocab_size, hidden), Cut.VOCAB, dtype, "LM head")
        elif not stage.is_first:
            yield _matrix(EMBEDDING, (config.vocab_size, hidden), Cut.VOCAB, dtype, "LM head")


def _layer(path: str, layer: LayerConfig, config: ModelConfig, dtype: StoredDtype) -> Iterator[TensorSpec]:
    """The tensors of one layer. A norm's name says nothing of its place, and all norms of the layer are alike."""
    hidden, norm, layer_inputs = config.hidden_size, config.decoder.norm, config.decoder.layer_inputs
    if isinstance(layer.attention, DeltaNetConfig):
        yield from _delta_net(f"{path}.linear_attn", layer.attention, norm, hidden, dtype)
    else:
        yield from _attention(f"{path}.self_attn", layer.attention, norm, hidden, dtype)
    if isinstance(layer.mlp, ExpertsConfig):
        yield from _experts(f"{path}.mlp", layer.mlp, norm, hidden, dtype, are_whole=config.expert_parallel)
    else:
        yield from _mlp(f"{path}.mlp", layer.mlp, hidden, dtype)
    for name in layer.norms.names():
        yield _norm(f"{path}.{name}", hidden, norm, dtype)
    if layer_inputs is not None:
        gate = _matrix(f"{path}.per_layer_input_gate", (layer_inputs.size, hidden), Cut.REPLICATED, dtype, "MLP")
        yield gate
        yield replace(gate, name=f"{path}.per_layer_projection.weight", shape=(hidden, layer_inputs.size))
        yield _norm(f"{path}.post_per_layer_input_norm", hidden, norm, dtype)
    if layer.has_scalar:
        yield TensorSpec(name=f"{path}.layer_scalar", shape=(1,), cut=Cut.REPLICATED, dtype=dtype, part="norms")


def _layer_inputs(
    inputs: LayerInputsConfig, decoder: DecoderConfig, hidden: int, dtype: StoredDtype
) -> Iterator[TensorSpec]:
    """What is computed for all layers before the first one."""
    width = decoder.num_layers * inputs.size
    yield _matrix(LAYER_EMBEDDING, (inputs.vocab_size, width), Cut.VOCAB, dtype, "embeddings")
    yield _matrix("model.per_layer_model_projection", (width, hidden), Cut.REPLICATED, dtype, "embeddings")
    yield _norm("model.per_layer_projection_norm", inputs.size, decoder.norm, dtype)


def _attention(
    path: str, attention: AttentionConfig, norm: NormConfig, hidden: int, dtype: StoredDtype
) -> Iterator[TensorSpec]:
    head_dim, kv_heads = attention.head_dim, attention.num_kv_heads
    query_size, kv_size = attention.num_heads * head_dim, kv_heads * head_dim
    order = None if attention.rope is None else attention.rope.row_order(head_dim)
    assert order is None or not attention.keys_are_values, "values keep the order that o_proj was trained with"
    q_rows = 2 * query_size if attention.has_gate else query_size
    q_proj = _matrix(f"{path}.q_proj", (q_rows, hidden), Cut.ROWS, dtype, "attention")
    yield from _linear(replace(q_proj, row_order=order), bias=attention.qkv_bias)
    kv_names = ("k_proj",) if attention.keys_are_values else ("k_proj", "v_proj")
    for name in () if attention.shares_kv else kv_names:
        weight = _matrix(f"{path}.{name}", (kv_size, hidden), Cut.ROWS, dtype, "attention")
        weight = replace(weight, max_shards=kv_heads, row_order=order if name == "k_proj" else None)
        yield from _linear(weight, bias=attention.qkv_bias)
    o_proj = _matrix(f"{path}.o_proj", (hidden, query_size), Cut.COLUMNS, dtype, "attention")
    yield from _linear(o_proj, bias=attention.o_bias)
    if attention.has_sinks:  # in float32, as kernels take them
        shape = (attention.num_heads,)
        yield TensorSpec(name=f"{path}.sinks", shape=shape, cut=Cut.ROWS, dtype="float32", part="attention")
    if attention.qk_norm == "head":
        for name in ("q_norm",) if attention.shares_kv else ("q_norm", "k_norm"):
            yield replace(_norm(f"{path}.{name}", head_dim, norm, dtype, "attention"), row_order=order)
    elif attention.qk_norm == "row":
        q_norm = _norm(f"{path}.q_norm", query_size, norm, dtype, "attention")
        k_norm = _norm(f"{path}.k_norm", kv_size, norm, dtype, "attention")
        yield replace(q_norm, cut=Cut.ROWS, row_order=order)
        yield replace(k_norm, cut=Cut.ROWS, row_order=order, max_shards=kv_heads)


def _delta_net(
    path: str, config: DeltaNetConfig, norm: NormConfig, hidden: int, dtype: StoredDtype
) -> Iterator[TensorSpec]:
    """The tensors of a gated delta net. What makes the decay is kept in float32, in which it is computed, and the norm
    of the heads is not that of the decoder: its weights are as they are."""
    num_heads = config.num_value_heads
    if config.is_fused_by_head:
        rows = {"in_proj_qkvz": config.num_channels + config.value_size, "in_proj_ba": 2 * num_heads}
    else:
        rows = {
            "in_proj_qkv": config.num_channels,
            "in_proj_z": config.value_size,
            "in_proj_b": num_heads,
            "in_proj_a": num_heads,
        }
    for name, count in rows.items():
        yield _matrix(f"{path}.{name}", (count, hidden), Cut.ROWS, dtype, "attention")
    conv = _matrix(f"{path}.conv1d", (config.num_channels, 1, config.conv_taps), Cut.ROWS, dtype, "attention")
    yield conv
    for name in ("A_log", "dt_bias"):
        yield TensorSpec(name=f"{path}.{name}", shape=(num_heads,), cut=Cut.ROWS, dtype="float32", part="attention")
    yield _norm(f"{path}.norm", config.value_dim, replace(norm, weight_offset=0.0), dtype, "attention")
    yield _matrix(f"{path}.out_proj", (hidden, config.value_size), Cut.COLUMNS, dtype, "attention")


def _mlp(path: str, mlp: MLPConfig, hidden: int, dtype: StoredDtype) -> Iterator[TensorSpec]:
    up_shape, down_shape = (mlp.intermediate_size, hidden), (hidden, mlp.intermediate_size)
    for name in ("gate_proj", "up_proj"):
        yield from _linear(_matrix(f"{path}.{name}", up_shape, Cut.ROWS, dtype, "MLP"), bias=mlp.bias)
    yield from _linear(_matrix(f"{path}.down_proj", down_shape, Cut.COLUMNS, dtype, "MLP"), bias=mlp.bias)


def _experts(
    path: str, config: ExpertsConfig, norm: NormConfig, hidden: int, dtype: StoredDtype, *, are_whole: bool
) -> Iterator[TensorSpec]:
    """The router, the experts, of which ranks hold parts or, with `are_whole`, some, and what all tokens share. The
    router's bias, correction and factors are kept in float32, in which routes are computed."""
    num_experts, size = config.routing.num_experts, config.intermediate_size
    yield _matrix(f"{path}.gate", (num_experts, hidden), Cut.REPLICATED, dtype, "MLP")
    vectors = {
        "bias": config.bias,
        "e_score_correction_bias": config.has_correction,
        "per_expert_scale": config.has_factors,
    }
    for name in (name for name, is_there in vectors.items() if is_there):
        name = f"{path}.gate.{name}"
        yield TensorSpec(name=name, shape=(num_experts,), cut=Cut.REPLICATED, dtype="float32", part="MLP")
    for name, shape, cut in (
        ("gate_proj", (size, hidden), Cut.ROWS),
        ("up_proj", (size, hidden), Cut.ROWS),
        ("down_proj", (hidden, size), Cut.COLUMNS),
    ):
        cut = Cut.EXPERTS if are_whole else cut
        weight = _matrix(f"{path}.{EXPERTS}.{name}", (num_experts, *shape), cut, dtype, "experts")
        yield from _linear(replace(weight, is_of_experts=True), bias=config.bias)
    if config.shared is not None:
        yield from _mlp(f"{path}.shared_expert", config.shared, hidden, dtype)
        if config.gates_shared:
            yield _matrix(f"{path}.shared_expert_gate", (1, hidden), Cut.REPLICATED, dtype, "MLP")
    if config.has_norms:
        # What the router reads has been normed without a weight, and is divided by the root of its size.
        yield _norm(f"{path}.gate_norm", hidden, replace(norm, weight_offset=0.0), dtype, "MLP", factor=hidden**-0.5)
        for name in ("experts_input_norm", "experts_norm", "shared_expert_norm"):
            yield _norm(f"{path}.{name}", hidden, norm, dtype, "MLP")


def _matrix(name: str, shape: tuple[int, ...], cut: Cut, dtype: StoredDtype, part: Part) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", shape=shape, cut=cut, dtype=dtype, part=part)


def _linear(weight: TensorSpec, *, bias: bool) -> Iterator[TensorSpec]:
    """A projection's weight, and its bias [out], or [experts, out], where it has one."""
    yield weight
    if bias:
        cut = Cut.REPLICATED if weight.cut is Cut.COLUMNS else weight.cut
        yield replace(weight, name=weight.name.replace(".weight", ".bias"), shape=weight.shape[:-1], cut=cut)


def _norm(
    name: str, size: int, norm: NormConfig, dtype: StoredDtype, part: Part = "norms", *, factor: float = 1.0
) -> TensorSpec:
    """A norm's weight. One that is changed when it is loaded is kept in float32, so that nothing is rounded."""
    kept: StoredDtype = dtype if norm.weight_offset == 0.0 and factor == 1.0 else "float32"
    return TensorSpec(
        name=f"{name}.weight",
        shape=(size,),
        cut=Cut.REPLICATED,
        dtype=kept,
        part=part,
        offset=norm.weight_offset,
        factor=factor,
    )
