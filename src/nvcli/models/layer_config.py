"""What a decoder is made of, layer by layer: families write it (`families/`), and everything else reads it. Torch-free.

Layers that are alike share one `LayerConfig`, so that a model is a short list of kinds and an index for each layer.
All sizes are those of the whole model, not of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nvcli.kernels.expert_settings import GatedActivation, Routing
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.rope_config import RopeConfig

Activation = Literal["silu", "gelu_tanh"]
"""The function on the gate of a gated MLP; `gelu_tanh` is GELU in its tanh approximation."""

QKNorm = Literal["head", "row"]
"""How queries and keys are normed before they are rotated: each head by itself, with one weight for all heads, or all
heads of a token together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Queries that grow with their position p: they are multiplied by 1 + beta × log(1 + floor(p / length))."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE)."""
    window: int | None = None
    """How many tokens a token attends to: itself and those right before it; None: all before it."""
    soft_cap: float | None = None
    """Scores are taken through soft_cap × tanh(score / soft_cap); None: they are not."""
    has_sinks: bool = False
    """Whether each head has a score of the checkpoint in every softmax that belongs to no key."""
    qk_norm: QKNorm | None = None
    norms_values: bool = False
    """Whether each head of the values is normed, without a weight."""
    keys_are_values: bool = False
    """Whether the projection of the keys is also that of the values."""
    reads_kv_of: int | None = None
    """The number of an earlier layer of the same heads and window, whose keys and values it reads; None: it has its
    own."""
    qkv_bias: bool = False
    o_bias: bool = False
    query_scaling: QueryScaling | None = None
    has_gate: bool = False
    """Whether each head's result is multiplied by the sigmoid of a gate, whose rows stand behind those of each query
    head in the projection of the queries."""

    @property
    def shares_kv(self) -> bool:
        """Whether it has no keys and values of its own."""
        return self.reads_kv_of is not None

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """How many KV heads each rank has. With fewer KV heads than ranks, neighbouring ranks hold the same one."""
        return max(1, self.num_kv_heads // tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """A gated delta net in attention's place: it keeps a state of fixed size, and no keys and values."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    """A multiple of the key heads, each of which belongs to as many value heads."""
    value_dim: int
    conv_taps: int
    """The tokens that the convolution reads: the token's own, and those right before it."""
    is_fused_by_head: bool
    """Whether files hold the projections fused key head by key head, or each of them whole."""

    @property
    def key_size(self) -> int:
        """The size of all keys of a token, which is that of its queries too."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def conv_shape(self, tensor_parallel_size: int) -> tuple[int, int]:
        """The inputs that a rank's convolution keeps: (tokens, channels)."""
        return self.conv_taps - 1, self.num_channels // tensor_parallel_size

    def recurrent_shape(self, tensor_parallel_size: int) -> tuple[int, int, int]:
        """The state that a rank keeps: (value heads, key size, value size)."""
        return self.num_value_heads // tensor_parallel_size, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """A gated MLP: down(activation(gate(x)) × up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in an MLP's place: gated MLPs of which a router chooses some for each token, and maybe one
    that all tokens share."""

    routing: Routing
    intermediate_size: int
    """Of each expert that is chosen."""
    activation: GatedActivation
    bias: bool = False
    """Whether the router's and the experts' projections have biases."""
    has_correction: bool = False
    """Whether numbers of the checkpoint are added to the scores for the choice of experts; see `route`."""
    has_factors: bool = False
    """Whether each expert has a number of the checkpoint that its weight of a token is multiplied by; see `route`."""
    shared: MLPConfig | None = None
    """The expert of all tokens; several of them are one with their sizes added up."""
    gates_shared: bool = False
    """Whether each token's result of the shared expert is multiplied by a gate."""
    has_norms: bool = False
    """Whether the router, the experts that it chooses and the shared expert have norms of their own
    (`experts_beside_mlp.py`); there is a shared expert then, without a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Where norms stand in a layer, and their names in the checkpoint. None: there is no norm at that place.

    A norm before a block reads the residual stream; a norm behind it reads the block's result, before that is added to
    the stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP read the same normed input, and their results are added up."""
        return self.before_mlp is None and self.after_mlp is None

    def names(self) -> Iterable[str]:
        """The names of the norms that there are, in the order of the layer."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return (name for name in places if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer."""

    attention: AttentionConfig | DeltaNetConfig
    mlp: MLPConfig | ExpertsConfig
    norms: LayerNorms = LayerNorms()
    has_scalar: bool = False
    """Whether the residual stream is multiplied by a number of the checkpoint at the layer's end."""

    @property
    def attends(self) -> AttentionConfig | None:
        """Its attention over keys and values; None where it keeps a state."""
        return self.attention if isinstance(self.attention, AttentionConfig) else None

    @property
    def dense_mlp(self) -> MLPConfig | None:
        """The MLP of all tokens: the only one, or the expert that they share; None where there is no such one."""
        return self.mlp if isinstance(self.mlp, MLPConfig) else self.mlp.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Inputs of each layer beside the residual stream (`layer_inputs.py`)."""

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """All norms of a decoder."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm without a bias."""
    weight_offset: float = 0.0
    """What is added to the weights of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """All layers of a decoder, and what stands before and behind them."""

    layer_kinds: tuple[LayerConfig, ...]
    """The different layers, in the order of their first use."""
    kind_of_layer: tuple[int, ...]
    """For each layer the index of its kind."""
    norm: NormConfig
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    rounds_embedding_scale: bool = False
    """Whether `embedding_scale` is rounded to the type of the weights first."""
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    """Logits are taken through soft_cap × tanh(logit / soft_cap); None: they are not."""
    layer_inputs: LayerInputsConfig | None = None
    layout: CheckpointLayout = PLAIN_LAYOUT

    @property
    def num_layers(self) -> int:
        return len(self.kind_of_layer)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Each layer's kind, in the order of the layers."""
        return tuple(self.layer_kinds[kind] for kind in self.kind_of_layer)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """For each layer the number of the layer whose keys and values it reads: itself, or one before it."""
        others = (None if layer.attends is None else layer.attends.reads_kv_of for layer in self.layers)
        return tuple(number if other is None else other for number, other in enumerate(others))

    @property
    def angles_per_position(self) -> int:
        """The cosines and sines of one position, over all rotations of the model."""
        attends = [layer.attends for layer in self.layer_kinds if layer.attends is not None]
        ropes = {(attention.rope, attention.head_dim) for attention in attends}
        return sum(head_dim for rope, head_dim in ropes if rope is not None)


def index_kinds(layers: Iterable[LayerConfig]) -> tuple[tuple[LayerConfig, ...], tuple[int, ...]]:
    """Return the different layers, and for each layer the index of its kind."""
    kinds: dict[LayerConfig, int] = {}
    index = tuple(kinds.setdefault(layer, len(kinds)) for layer in layers)
    return tuple(kinds), index
