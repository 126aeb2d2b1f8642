"""ModelFile: config.json with the readers that families share. Errors name the file and the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nvcli.core.validation import show
from nvcli.kernels.elementwise_settings import PlainActivation
from nvcli.kernels.expert_settings import ExpertActivation, Routing
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import (
    MOST_STREAMS,
    DecoderConfig,
    LayerConfig,
    LayerNorms,
    LearnedPositions,
    index_kinds,
)
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import FeedForward, Mixer, NormConfig
from nvcli.models.mixers.mlp import MLPConfig, PlainMLPConfig
from nvcli.models.rope_config import RopeConfig, read_rope

MAX_LAYERS = 10_000
"""The most layers of a model: more than any has, yet few enough for a small list."""

MAX_HEAD_DIM = 4096
"""The largest head size: more than any model has, yet small enough for a short list of a head's dimensions."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
NORMS_BEFORE = LayerNorms()
"""Norms of what the blocks read alone."""

_ACTIVATIONS: dict[str, ExpertActivation] = {
    "silu": ExpertActivation(),
    "swish": ExpertActivation(),
    "gelu_pytorch_tanh": ExpertActivation(kind="gelu_tanh"),
    "gelu_new": ExpertActivation(kind="gelu_tanh"),
}
_DENSE_ACTIVATIONS = {
    **_ACTIVATIONS,
    "gelu": ExpertActivation(kind="gelu"),
    "relu2": ExpertActivation(kind="gated_relu2"),
}
_PLAIN_ACTIVATIONS: dict[str, PlainActivation] = {
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_MAX_TAPS = 16
"""The most tokens that a convolution reads; more than any model's does."""

MAX_EXPERTS = 1024
"""The most experts of a layer; more than any has."""

NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Most families' keys for the number of experts of a layer."""


class ModelFile(JsonFile):
    """config.json of a model, or its section for text."""

    def decoder(self, layers: LayerConfig | Iterable[LayerConfig], **settings: Any) -> DecoderConfig:
        """Make the decoder of these layers, or of layers that are all alike. `settings` are fields of `DecoderConfig`;
        the norm defaults to RMSNorm."""
        if isinstance(layers, LayerConfig):
            layers = [layers] * self.num_layers()
        kinds, kind_of_layer = index_kinds(layers)
        if "norm" not in settings:
            settings["norm"] = self.rms_norm()
        return DecoderConfig(layer_kinds=kinds, kind_of_layer=kind_of_layer, **settings)

    def num_layers(self) -> int:
        """Read the number of layers."""
        return self.positive("num_hidden_layers", most=MAX_LAYERS)

    def rms_norm(self, weight_offset: float = 0.0) -> NormConfig:
        """Read the settings of RMSNorm."""
        return NormConfig(eps=self.positive_number("rms_norm_eps"), weight_offset=weight_offset)

    def layer_norm(self, key: str = "layer_norm_eps", weight_offset: float = 0.0) -> NormConfig:
        """Read the settings of LayerNorm with biases."""
        eps = self.positive_number(key, 1e-5)
        return NormConfig(eps=eps, kind="layer", has_bias=True, weight_offset=weight_offset)

    def rope(self, default_theta: float | None = 10_000.0, **settings: Any) -> RopeConfig:
        """Read the rotation of heads. `settings` are the other arguments of `read_rope`."""
        return read_rope(self, head_dim=self.head_dim(), default_theta=default_theta, **settings)

    def attention(self, *, rope: RopeConfig | None, bias: bool = False, **traits: Any) -> AttentionConfig:
        """Read the heads of one kind of attention. `bias`: whether all projections have one. `traits` are the other
        fields of `AttentionConfig`; the scale has its usual default."""
        head_dim = self.head_dim()
        return AttentionConfig(
            num_heads=self.positive("num_attention_heads"),
            num_kv_heads=self.num_kv_heads(),
            head_dim=head_dim,
            rope=rope,
            **{"scale": head_dim**-0.5, "qkv_bias": bias, "o_bias": bias, **traits},
        )

    def bias(self, *, default: bool = False) -> bool:
        """Read whether attention has biases."""
        return self.get("attention_bias", bool, default)

    def mlp_bias(self, *, default: bool = False) -> bool:
        """Read whether MLPs have biases."""
        return self.get("mlp_bias", bool, default)

    def head_dim(self) -> int:
        """Read `head_dim`; if it is absent or null, the hidden size is divided by the number of heads."""
        key = "head_dim"
        if self.has(key):
            head_dim = self.positive(key, most=MAX_HEAD_DIM)
        else:
            hidden_size, num_heads = self.positive("hidden_size"), self.positive("num_attention_heads")
            if hidden_size % num_heads:
                raise self.error(key, f"missing, and {num_heads} heads do not divide the hidden size {hidden_size}")
            head_dim = hidden_size // num_heads
            if head_dim > MAX_HEAD_DIM:
                raise self.error(key, f"missing, and {head_dim:,}, each head's share of the hidden size, is too large")
        if head_dim % 2:
            raise self.error(key, f"{head_dim} is odd; rotary embedding pairs dimensions")
        return head_dim

    def num_kv_heads(self) -> int:
        """Read the number of KV heads; if it is absent or null, each head has its own."""
        num_heads = self.positive("num_attention_heads")
        num_kv_heads = self.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
        return num_kv_heads

    def streams(self, norm: NormConfig, *, default_iterations: int = 0, **settings: Any) -> StreamSettings:
        """Read residual streams that are mixed with each other. `default_iterations`: of the Sinkhorn-Knopp algorithm;
        0: the files name none. `settings` are other fields of `StreamSettings`."""
        if default_iterations:
            settings["iterations"] = self.positive("hc_sinkhorn_iters", default_iterations, most=1000)
        return StreamSettings(
            count=self.positive("hc_mult", 4, least=2, most=MOST_STREAMS),
            norm_eps=norm.eps,
            eps=self.positive_number("hc_eps", 1e-6),
            **{"factor": 2.0, **settings},
        )

    def learned_positions(self, offset: int = 0) -> LearnedPositions:
        """Read how many positions have an embedding; `offset`: the row of the first one."""
        return LearnedPositions(count=self.positive("max_position_embeddings"), offset=offset)

    def conv_taps(self, key: str) -> int:
        """Read the number of tokens that a short convolution reads."""
        return self.positive(key, least=2, most=_MAX_TAPS)

    def mlp(
        self,
        *,
        key: str = "hidden_act",
        default: str = "silu",
        bias: bool = False,
        size_key: str = "intermediate_size",
        norms_hidden: bool = False,
    ) -> MLPConfig:
        """Read the gated MLP, whose activation is under `key`."""
        activation = self.choice(key, _DENSE_ACTIVATIONS, default)
        size = self.positive(size_key)
        return MLPConfig(intermediate_size=size, activation=activation, bias=bias, norms_hidden=norms_hidden)

    def plain_mlp(self, default: str, *, bias: bool = False, default_size: int | None = None) -> PlainMLPConfig:
        """Read the MLP without a gate, whose activation is `default` if the file has none."""
        activation = self.plain_activation(default)
        size = self.positive("intermediate_size", default_size)
        return PlainMLPConfig(intermediate_size=size, activation=activation, bias=bias)

    def plain_activation(self, default: str, key: str = "hidden_act") -> PlainActivation:
        """Read an activation without a gate."""
        return self.choice(key, _PLAIN_ACTIVATIONS, default)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> ExpertActivation:
        """Read the activation of experts with gates."""
        return self.choice(key, _ACTIVATIONS, default)

    def clamped_swiglu(self) -> ExpertActivation:
        """Read the clamped activation of GPT-OSS, which adds 1 to the other half."""
        return ExpertActivation(
            kind="clamped_swiglu",
            alpha=self.positive_number("swiglu_alpha", 1.702),
            limit=self.positive_number("swiglu_limit", 7.0),
            offset=1.0,
        )

    def optional_number(self, key: str, default: float | None) -> float | None:
        """Read a number above zero, or None if the file says null; if absent, it is `default`."""
        if key not in self.values:
            return default
        return None if self.values[key] is None else self.positive_number(key)

    def window(self, default: int | None = None) -> int | None:
        """Read `sliding_window`: null turns windows off; if absent, it is `default`."""
        if "sliding_window" not in self.values:
            return default
        return None if self.values["sliding_window"] is None else self.positive("sliding_window")

    def bounded(self, window: int | None) -> int | None:
        """Return the window, or None if it covers the longest sequence, as full attention does."""
        return None if window is None or window >= self.positive("max_position_embeddings") else window

    def layer_types(self, *, supported: tuple[str, ...] = (FULL, SLIDING)) -> list[str] | None:
        """Read `layer_types`, or None if it is absent. Raises LoadError if it names a type that is not in `supported`,
        or has the wrong number of layers."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list):
            raise self.error("layer_types", f"{show(types)} is not a list")
        if others := [kind for kind in types if kind not in supported]:
            other = show(others[0]).strip('"')
            raise self.error("layer_types", f"{other} is not supported here, only {' and '.join(supported)}")
        if len(types) != self.num_layers():
            count = self.num_layers()
            raise self.error("layer_types", f"names {len(types)} layers, and `num_hidden_layers` is {count}")
        return types

    def of_layers(self, key: str, allowed: Sequence[object] = (), *, may_be_longer: bool = False) -> list[Any] | None:
        """Read a list with an entry for each layer, out of `allowed` ones if there are any; None: it is absent or null.
        `may_be_longer`: entries of other layers may follow, which are left out."""
        found, count = self.values.get(key), self.num_layers()
        if found is None:
            return None
        if isinstance(found, list) and may_be_longer:
            found = found[:count]
        if not isinstance(found, list) or len(found) != count or (allowed and any(one not in allowed for one in found)):
            what = f" of {' and '.join(map(str, allowed))}" if allowed else ""
            raise self.error(key, f"{show(self.values[key])} is not a list{what} for {count} layers")
        return found

    def layer_kinds(self, is_full: Callable[[int], bool], *, other: str = SLIDING) -> list[str]:
        """Read `layer_types`; if it is absent, the layers whose number `is_full` takes have full attention, and the
        others are of the kind `other`."""
        types = self.layer_types(supported=(FULL, other))
        return types or [FULL if is_full(number) else other for number in range(self.num_layers())]

    def every_nth_full(self, default: int, key: str = "sliding_window_pattern") -> list[str]:
        """Read `layer_types`; if it is absent, every n-th layer has full attention, and the others have a window.

        n is the value of `key`, or `default` if that is absent.
        """
        return self.layer_kinds(lambda number: (number + 1) % self.positive(key, default) == 0)

    def with_full(self, kinds: list[str]) -> list[str]:
        """Return kinds of layers. Raises LoadError if none has full attention."""
        if FULL not in kinds:
            raise self.error("layer_types", f"{show(kinds)} has no layer of full attention")
        return kinds

    def window_of(self, kind: str, default: int) -> int | None:
        """Read the window of a kind of layers; those of full attention have none."""
        return self.bounded(self.window(default)) if kind == SLIDING else None

    def by_kind(
        self, attention: AttentionConfig, default_window: int, *, full_rotates: bool = True
    ) -> dict[str, AttentionConfig]:
        """Return attention by kind of layers: with a window, and without one, where it may not rotate."""
        full = attention if full_rotates else replace(attention, rope=None)
        return {SLIDING: replace(attention, window=self.window_of(SLIDING, default_window)), FULL: full}

    def layers(
        self,
        kinds: Sequence[str],
        mixers: Mapping[str, Mixer],
        mlps: FeedForward | Iterable[FeedForward],
        norms: LayerNorms = NORMS_BEFORE,
    ) -> list[LayerConfig]:
        """Make layers of these kinds, each with the mixer of its kind. `mlps`: one MLP for all layers, or one for
        each."""
        mlps = [mlps] * len(kinds) if isinstance(mlps, FeedForward) else mlps
        return [LayerConfig(mixer=mixers[kind], mlp=mlp, norms=norms) for kind, mlp in zip(kinds, mlps, strict=True)]

    def mlps(self, experts: ExpertsConfig, is_sparse: Iterable[bool]) -> list[MLPConfig | ExpertsConfig]:
        """Return the block of each layer after its mixer: `experts`, or in layers that have none the dense MLP."""
        dense = self.mlp()
        return [experts if sparse else dense for sparse in is_sparse]

    def sparse_layers(self, default: int = 1) -> list[bool]:
        """Read which layers have experts from `mlp_layer_types`; if it is absent, all but the first
        `first_k_dense_replace` ones do, by default `default`."""
        kinds = self.of_layers("mlp_layer_types", (DENSE, SPARSE))
        if kinds is None:
            first = self.get("first_k_dense_replace", int, default)
            return [number >= first for number in range(self.num_layers())]
        return [kind == SPARSE for kind in kinds]

    def routing(
        self, *, keys: tuple[str, ...] = NUM_EXPERTS, chosen_key: str = "num_experts_per_tok", **settings: Any
    ) -> Routing:
        """Read the number of experts from one of `keys`, and the number of experts per token from `chosen_key`.
        `settings` are the other fields of `Routing`."""
        key = next(filter(self.has, keys), keys[0])
        num_experts = self.positive(key, most=MAX_EXPERTS)
        experts_per_token = self.positive(chosen_key)
        if experts_per_token > num_experts:
            raise self.error(chosen_key, f"{experts_per_token} is more than `{key}`, {num_experts}")
        return Routing(num_experts=num_experts, experts_per_token=experts_per_token, **settings)

    def sigmoid_routing(
        self, scale_key: str = "routed_scaling_factor", default: float | None = 1.0, **settings: Any
    ) -> Routing:
        """Read what `routing` does for experts that are chosen by sigmoid scores, and the factor of their weights from
        `scale_key`. Weights are renormalised unless `settings` say otherwise."""
        scale = self.positive_number(scale_key, default)
        return self.routing(scoring="sigmoid", scale=scale, **{"renormalise": True, **settings})

    def experts(self, routing: Routing, *, size_key: str = "moe_intermediate_size", **settings: Any) -> ExpertsConfig:
        """Read the experts' size from `size_key`, and their activation. `settings` are fields of `ExpertsConfig`."""
        if "activation" not in settings:
            settings["activation"] = self.activation()
        return ExpertsConfig(routing=routing, intermediate_size=self.positive(size_key), **settings)

    def routing_with_groups(self, routing: Routing) -> Routing:
        """Read the groups that experts are chosen from, out of `n_group` and `topk_group`."""
        if not self.has("n_group"):
            return routing
        num_groups, chosen = self.positive("n_group"), self.positive("topk_group")
        size, remainder = divmod(routing.num_experts, num_groups)
        if remainder:
            raise self.error("n_group", f"{num_groups} groups do not divide {routing.num_experts} experts")
        if chosen < num_groups and size < 2 and routing.sums_two_best:
            raise self.error("n_group", f"{num_groups} groups have one expert each, and their two best ones count")
        if chosen > num_groups or chosen * size < routing.experts_per_token:
            raise self.error("topk_group", f"{chosen} groups of {num_groups} have too few experts for a token")
        return replace(routing, num_groups=num_groups, groups_per_token=chosen)


def read_by_type(
    config: ModelFile, readers: Mapping[str, Callable[[ModelFile], DecoderConfig]], default: str
) -> DecoderConfig:
    """Read the text part of a model by its `model_type`, which may be absent. Raises LoadError if `readers` have
    none."""
    return config.choice("model_type", readers, default)(config)
