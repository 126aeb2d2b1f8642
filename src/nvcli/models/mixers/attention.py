"""AttentionConfig: attention to the keys and values of earlier tokens. `models/layers.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from nvcli.attention.kv_layout import KVDtype, token_bytes
from nvcli.attention.spec import AttentionSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.elementwise_settings import GateFunction
from nvcli.models.mixers.block_index import BlockIndexConfig
from nvcli.models.mixers.mixer import (
    NO_CHOICE,
    ChoosingMixer,
    LayerContext,
    Mixer,
    MixerCosts,
    Piece,
    Ranks,
    Rotation,
    choice_dependence,
)
from nvcli.models.mixers.pooled_index import PooledIndexConfig
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import FUSED, Sharding, StoredDtype, TensorSpec, matrix, vector

GATE = "g_proj"
"""The name of the projection of gates."""
GATE_BIAS = "gate_bias"
"""The name of the numbers of single heads that are added to gates."""
CHANNEL_ROOTS = "sqk"
"""The name of the numbers by whose squares those of queries are multiplied."""
ROW_NORM = "attn_sub_norm"
"""The name of the norm of the results of all heads."""
RELATIVE, PROFILES = "r_proj", "rel_logits_proj.proj"
"""The names of the projection to numbers that weigh profiles over distances, and of these profiles."""
HEAD_SCALES = "softmax_scaling"
"""The name of the numbers by which queries are scaled head by head."""
QKNorm = Literal["head", "layer", "own", "row"]
"""How queries and keys are normed before they are rotated: each head by itself, with one weight for all heads (by
RMSNorm, or by LayerNorm with a bias) or with weights of its own (by the decoder's kind of norm), or all heads of a
token together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """The scaling of queries by their position p: they are multiplied by
    1 + beta × log(1 + floor((p + offset) / length)), as a power by (1 + (p + offset) / length)^beta, or clamped by
    1 + beta × log(max(1, (p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0
    kind: Literal["steps", "power", "clamped"] = "steps"


def head_scale_tensors(path: str, num_heads: int, sharding: Sharding) -> Iterator[TensorSpec]:
    """Yield the numbers of each head by which its queries are multiplied: factor × log(position + 1) + bias (scalable
    softmax, https://arxiv.org/abs/2501.19399)."""
    for kind in ("scale", "bias"):
        yield vector(f"{path}.{HEAD_SCALES}.{kind}", num_heads, sharding, "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeScores:
    """Numbers that each token adds to the scores of near keys: each head has some of its own, which weigh profiles over
    the distances. They are scaled as queries are."""

    size: int
    """The numbers of a head, and the profiles."""
    extent: int
    """The distances of a profile, from 0 on; keys further away get nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """The gates by which the result of attention is multiplied: one for each number, or with `is_of_heads` for each
    head."""

    function: GateFunction = "sigmoid"
    is_in_queries: bool = False
    """Whether the query projection has the gates' rows, those of each head after those of its query; otherwise they
    are a projection of their own, `g_proj`."""
    is_of_heads: bool = False
    has_bias: bool = False
    """Whether each head has a number that is added to what the function reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(ChoosingMixer):
    """The attention of one layer."""

    name: ClassVar[str] = "self_attn"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """The size of each value, up to `head_dim`; None: `head_dim`."""
    value_factor: float = 1.0
    """Values are multiplied by it."""
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE)."""
    window: int | None = None
    """The number of tokens that a token attends to, itself and those right before it; None: all earlier ones."""
    both_ways: bool = False
    """Whether a token attends to as many tokens after it, too."""
    soft_cap: float | None = None
    """Scores become soft_cap × tanh(score / soft_cap); None: no cap."""
    has_sinks: bool = False
    """Whether each head has a learned score that belongs to no key in every softmax."""
    qk_norm: QKNorm | None = None
    clip: float | None = None
    """Queries, keys and values are clamped to its negative and to it, after norms of whole rows and before those of
    heads; None: they are not."""
    weighs_norms: bool = True
    """Whether the norms of single heads have weights."""
    norms_last: bool = False
    """Whether the heads are normed after the rotation."""
    norms_values: bool = False
    """Whether each head of the values is normed, without a weight."""
    norms_results: bool = False
    """Whether each head of the result is normed, without a weight, before gates of each number multiply it."""
    norms_row: bool = False
    """Whether the results of all heads of a token are normed together before the output projection."""
    keys_are_values: bool = False
    """Whether values use the projection of the keys."""
    reads_kv_of: int | None = None
    """The number of an earlier layer of the same heads and window, whose keys and values it reads; None: it has its
    own."""
    input_size: int | None = None
    """The size of what queries, keys and values are projected from; None: that of the residual stream."""
    qkv_bias: bool = False
    o_bias: bool = False
    query_scaling: QueryScaling | None = None
    channel_factor: float | None = None
    """With it each number of a rotated query is multiplied by the square of a number from the checkpoint times this."""
    gate: OutputGate | None = None
    """None: nothing is multiplied by gates."""
    relative: RelativeScores | None = None
    """None: tokens add nothing to scores."""
    is_convolved: bool = False
    """Whether the layer convolves keys and values (`ResultConvolutions`)."""
    index: BlockIndexConfig | PooledIndexConfig | None = None
    """How blocks or pools of keys are chosen; it is there without `top_k` where a run makes no choice."""

    @property
    def module(self) -> str:
        if self.is_convolved:
            return "nvcli.models.convolved_layer:ConvolvedAttention"
        return "nvcli.models.layers:Attention" if self.top_k is None or self.index is None else self.index.module

    @property
    def note(self) -> str | None:
        return None if self.index is None or self.top_k is not None else NO_CHOICE

    def with_both_ways(self) -> AttentionConfig | None:
        """Return it with attention to later tokens. A window then reaches one token further, as in transformers."""
        if self.index is not None or self.relative is not None or self.is_convolved:
            return None
        return replace(self, both_ways=True, window=None if self.window is None else self.window + 1)

    @property
    def shares_kv(self) -> bool:
        """Whether it has no keys and values of its own."""
        return self.reads_kv_of is not None

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of KV heads of each rank. With fewer KV heads than ranks, neighbouring ranks hold the same
        one."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    @property
    def result_dim(self) -> int:
        """The size of a value, and of each query head's result."""
        return self.value_dim or self.head_dim

    @property
    def has_wide_gate(self) -> bool:
        """Whether the product of queries, keys and values also has a gate for each number of the results."""
        return self.gate is not None and not self.gate.is_of_heads

    @property
    def rotation(self) -> Rotation | None:
        return None if self.rope is None else (self.rope, self.head_dim)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        of_choice = () if self.top_k is None or self.index is None else self.index.rotations
        return *super(AttentionConfig, self).rotations, *of_choice

    @property
    def batch_dependence(self) -> str | None:
        if self.top_k is not None:
            return choice_dependence(self.top_k)
        if self.both_ways:
            return "attention to later tokens, which is computed for whole prompts at a time"
        if self.qk_norm in (None, "head") and not self.norms_values and not self.norms_row:
            return None
        return (
            "norms of queries, keys, values or results that may round otherwise where there are other numbers of rows"
        )

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> AttentionSpec:
        plain = self._plain_spec(tensor_parallel_size, kv_group)
        if self.top_k is None or self.index is None:
            return plain
        row_dim = 2 * plain.num_kv_heads * self.head_dim
        return replace(
            plain,
            num_kv_heads=1,
            head_dim=row_dim + self.index.kept_dim,
            value_dim=row_dim,
            has_values=False,
            top_k=self.top_k,
            index_dim=self.index.kept_dim,
            index_pools=self.index.pools,
            row_heads=plain.num_kv_heads,
            shares_choice=self.index.shares_choice,
        )

    def choice_costs(self, num_layers: int, kv_dtype: KVDtype) -> MixerCosts | None:
        if self.top_k is None or self.index is None:
            return None
        return MixerCosts(
            kv_bytes_per_token=num_layers * token_bytes(1, self.index.read_dim, kv_dtype),
            flops_per_pair=num_layers * 2 * self.index.read_dim * self.index.num_heads,
        )

    def _plain_spec(self, tensor_parallel_size: int, kv_group: int = 0) -> AttentionSpec:
        """Return the spec of attention to all keys."""
        return AttentionSpec(
            num_heads=self.num_heads // tensor_parallel_size,
            num_kv_heads=self.kv_heads_per_rank(tensor_parallel_size),
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            both_ways=self.both_ways,
            soft_cap=self.soft_cap,
            has_sinks=self.has_sinks,
            bias_extent=None if self.relative is None else self.relative.extent,
            kv_group=kv_group,
            value_dim=self.value_dim,
        )

    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        spec = self._plain_spec(tensor_parallel_size)
        return MixerCosts(
            window=self.window if self.top_k is None else self.top_k,
            kv_bytes_per_token=num_layers * spec.token_bytes(kv_dtype),
            flops_per_pair=num_layers * 2 * spec.num_heads * (spec.head_dim + spec.result_dim),
        )

    def num_kernels(self, ranks: Ranks) -> int:
        of_choice = 0
        if self.top_k is not None and self.index is not None:
            of_choice = self.index.num_kernels(self.kv_heads_per_rank(ranks.size))
        of_norms = 2 * (self.qk_norm == "row")
        return Mixer.num_kernels(self, ranks) + of_norms + of_choice + (self.relative is not None)

    def check(self, ranks: Ranks) -> Iterator[str]:
        size = ranks.size
        if self.num_heads % size:
            yield f"{self.num_heads} attention heads do not divide by {size}"
        elif self.num_kv_heads % size and size % self.num_kv_heads:
            yield f"{self.num_kv_heads} KV heads neither divide by {size} nor divide it"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        heads, kv_heads = self.num_heads // ranks.size, self.kv_heads_per_rank(ranks.size)
        queries, results = heads * self.head_dim, heads * self.result_dim
        yield Piece("q_proj", queries, None, queries + results if self.has_wide_gate else queries)
        yield Piece("o_proj", results, "o_proj")
        if self.relative is not None:
            yield Piece(RELATIVE, heads * self.relative.size, None, heads * self.relative.size)
        for name, size in (("k_proj", self.head_dim), ("v_proj", self.result_dim)):
            yield Piece(name, kv_heads * size, None, kv_heads * size)
        if self.top_k is not None and self.index is not None:
            yield from self.index.pieces(kv_heads)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        both = self.head_dim + self.result_dim
        queries, keys = self.num_heads * both // ranks.size, self.kv_heads_per_rank(ranks.size) * both
        of_choice = 0 if self.top_k is None else 2 * queries + 2 * keys  # by head, and what chooses
        relative = self.relative
        of_bias = 0 if relative is None else self.num_heads // ranks.size * (relative.size + relative.extent)
        return 3 * hidden_size + (2 if self.has_wide_gate else 1) * queries + 2 * keys + of_choice + of_bias

    def unused_tensors(self, path: str) -> Iterator[str]:
        names = ("k_proj", "v_proj", "k_norm") if self.shares_kv else ()
        yield from (f"{path}.{name}.weight" for name in names)
        if self.index is not None and self.top_k is None:
            yield from self.index.unused_tensors(path)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        result_size, value_size = self.num_heads * self.result_dim, self.num_kv_heads * self.result_dim
        order = None if self.rope is None else self.rope.row_order(self.head_dim)
        assert order is None or not self.keys_are_values, "values keep the order that o_proj was trained with"
        gate = self.gate
        rows = {"q_proj": query_size, "k_proj": kv_size, "v_proj": value_size}
        names = ("q_proj",) if self.shares_kv else ("q_proj", "k_proj") if self.keys_are_values else tuple(rows)
        fused, reading = FUSED["qkv_proj"], context
        if self.input_size is not None:
            reading = replace(context, hidden_size=self.input_size)
        if gate is not None and gate.is_in_queries:
            rows["q_proj"] *= 2
        elif gate is not None and not gate.is_of_heads:
            fused = (*fused, GATE)
        if self.relative is not None:
            assert not self.has_wide_gate, "no family has both"
            fused = (*fused, RELATIVE)
        for name in names:
            max_shards = None if name == "q_proj" else self.num_kv_heads
            row_order = None if name == "v_proj" else order
            weights = reading.input_projection(f"{path}.{name}", rows[name], "attention", fused, bias=self.qkv_bias)
            yield from (replace(one, max_shards=max_shards, row_order=row_order) for one in weights)
        if gate is not None and not gate.is_in_queries:
            size, kept_with = (self.num_heads, ()) if gate.is_of_heads else (result_size, fused)
            yield from reading.input_projection(f"{path}.{GATE}", size, "attention", kept_with)
            if gate.has_bias:
                yield vector(f"{path}.{GATE_BIAS}", self.num_heads, Sharding.ROWS, "attention")
        if (relative := self.relative) is not None:
            yield from context.input_projection(
                f"{path}.{RELATIVE}", self.num_heads * relative.size, "attention", fused
            )
            profiles = vector(f"{path}.{PROFILES}", 0, Sharding.REPLICATED, "attention", context.dtype)
            yield replace(profiles, shape=(relative.size, relative.extent), in_linear_layer=False)
        if self.index is not None and self.top_k is not None:
            yield from self.index.tensors(path, context, order)
        yield from context.output_projection(f"{path}.o_proj", result_size, "attention", bias=self.o_bias)
        if self.channel_factor is not None:
            squared = vector(f"{path}.{CHANNEL_ROOTS}", query_size, Sharding.ROWS, "attention")
            yield replace(squared, factor=self.channel_factor, row_order=order)
        if self.norms_row and context.norm.has_weight:
            yield replace(context.norm_weight(f"{path}.{ROW_NORM}", result_size, "attention"), sharding=Sharding.ROWS)
        if self.has_sinks:  # in float32, as kernels take them
            yield vector(f"{path}.sinks", self.num_heads, Sharding.ROWS, "attention")
        if self.qk_norm == "head" and self.weighs_norms:
            for name in ("q_norm",) if self.shares_kv else ("q_norm", "k_norm"):
                yield replace(context.norm_weight(f"{path}.{name}", self.head_dim, "attention"), row_order=order)
        elif self.qk_norm == "layer":
            for name in ("q_norm", "k_norm"):
                weight = replace(context.norm_weight(f"{path}.{name}", self.head_dim, "attention"), row_order=order)
                yield weight
                yield replace(weight, name=f"{path}.{name}.bias")
        elif self.qk_norm == "own":
            for name, num_heads in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
                shape = num_heads, self.head_dim
                weight = matrix(f"{path}.{name}", shape, Sharding.ROWS, context.dtype, "norms")
                yield replace(weight, max_shards=num_heads, column_order=order, in_linear_layer=False)
        elif self.qk_norm == "row":
            q_norm = context.norm_weight(f"{path}.q_norm", query_size, "attention")
            k_norm = context.norm_weight(f"{path}.k_norm", kv_size, "attention")
            yield replace(q_norm, sharding=Sharding.ROWS, row_order=order)
            yield replace(k_norm, sharding=Sharding.ROWS, row_order=order, max_shards=self.num_kv_heads)
