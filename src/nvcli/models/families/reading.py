"""What the families read alike from config.json: heads, windows, MLPs and norms. Errors name the file and the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, index_kinds
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.mlp import Activation, MLPConfig
from nvcli.models.rope_config import RopeConfig, read_rope
from nvcli.validation import show

MAX_LAYERS = 10_000
"""The most layers of a model; more than any has, so few that a list of them is small."""
MAX_HEAD_DIM = 4096
"""The largest head size; more than any model has, so few that a list of a head's dimensions is small."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Windows = Sequence[int | None]
"""For each layer how many tokens attention sees, the token's own included; None: all of them."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_decoder(config: JsonFile, layers: Iterable[LayerConfig], **settings: Any) -> DecoderConfig:
    """Make the decoder of these layers. `settings` are fields of `DecoderConfig`; the norm is RMSNorm if not given."""
    kinds, kind_of_layer = index_kinds(layers)
    if "norm" not in settings:
        settings["norm"] = read_rms_norm(config)
    return DecoderConfig(layer_kinds=kinds, kind_of_layer=kind_of_layer, **settings)


def num_layers(config: JsonFile) -> int:
    """Read the number of layers."""
    return config.positive("num_hidden_layers", most=MAX_LAYERS)


def read_rms_norm(config: JsonFile, weight_offset: float = 0.0) -> NormConfig:
    """Read the settings of RMSNorm."""
    return NormConfig(eps=config.positive_number("rms_norm_eps"), weight_offset=weight_offset)


def read_attention(
    config: JsonFile,
    *,
    default_theta: float | None,
    rope: Callable[[int], RopeConfig | None] | None = None,
    **traits: Any,
) -> AttentionConfig:
    """Read heads and rope of one kind of attention.

    `rope` makes another rope than that of config.json, from the head size. `traits` are fields of `AttentionConfig`;
    they take the place of what the file says, and `head_dim`, `num_kv_heads` and `scale` may be among them.
    """
    traits.setdefault("head_dim", None)
    head_dim = traits.pop("head_dim") or read_head_dim(config)
    traits.setdefault("num_kv_heads", None)
    num_kv_heads = traits.pop("num_kv_heads") or read_num_kv_heads(config)
    traits.setdefault("scale", head_dim**-0.5)
    return AttentionConfig(
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope(head_dim) if rope else read_rope(config, head_dim=head_dim, default_theta=default_theta),
        **traits,
    )


def read_head_dim(config: JsonFile, key: str = "head_dim") -> int:
    """Read `head_dim`, or where it is absent or null the heads' share of the hidden size."""
    if config.values.get(key) is not None:
        head_dim = config.positive(key, most=MAX_HEAD_DIM)
    else:
        hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        if hidden_size % num_heads:
            raise config.error(key, f"missing, and {num_heads} heads do not divide the hidden size {hidden_size}")
        head_dim = hidden_size // num_heads
        if head_dim > MAX_HEAD_DIM:
            raise config.error(key, f"missing, and {head_dim:,}, each head's share of the hidden size, is too large")
    if head_dim % 2:
        raise config.error(key, f"{head_dim} is odd; rotary embedding pairs dimensions")
    return head_dim


def read_num_kv_heads(config: JsonFile, key: str = "num_key_value_heads") -> int:
    """Read the number of KV heads; where it is absent or null, each head has its own."""
    num_heads = config.positive("num_attention_heads")
    if config.values.get(key) is None:
        return num_heads
    num_kv_heads = config.positive(key)
    if num_heads % num_kv_heads:
        raise config.error(key, f"{num_kv_heads} does not divide {num_heads} attention heads")
    return num_kv_heads


def read_mlp(config: JsonFile, *, key: str = "hidden_act", default: str = "silu", bias: bool = False) -> MLPConfig:
    """Read the gated MLP, whose activation is under `key`."""
    activation = read_activation(config, key, default)
    return MLPConfig(intermediate_size=config.positive("intermediate_size"), activation=activation, bias=bias)


def read_activation(config: JsonFile, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Read the activation of an MLP's gate."""
    found = config.values.get(key)
    activation = _ACTIVATIONS.get(str(default if found is None else found))
    if activation is None:
        raise config.error(key, f"{show(found)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return activation


def read_optional(config: JsonFile, key: str, default: float | None) -> float | None:
    """Read a number above zero, or None where the file says null; absent, it is `default`."""
    if key not in config.values:
        return default
    return None if config.values[key] is None else config.positive_number(key)


def read_window(config: JsonFile, default: int | None = None) -> int | None:
    """Read `sliding_window`, which turns windows off where it is null; absent, it is `default`."""
    if "sliding_window" not in config.values:
        return default
    return None if config.values["sliding_window"] is None else config.positive("sliding_window")


def bounded(window: int | None, config: JsonFile) -> int | None:
    """Return the window, or None where it sees as much as full attention of the longest sequence does."""
    return None if window is None or window >= config.positive("max_position_embeddings") else window


def read_layer_types(config: JsonFile, *, supported: tuple[str, ...] = (FULL, SLIDING)) -> list[str] | None:
    """Read `layer_types`, or None where it is absent. Raises LoadError where it names a type that is not in
    `supported`, or not as many layers as there are."""
    types = config.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise config.error("layer_types", f"{show(types)} is not a list")
    if others := [kind for kind in types if kind not in supported]:
        other = show(others[0]).strip('"')
        raise config.error("layer_types", f"{other} is not supported here, only {' and '.join(supported)}")
    if len(types) != num_layers(config):
        raise config.error("layer_types", f"names {len(types)} layers, and `num_hidden_layers` is {num_layers(config)}")
    return types


def every_nth_full(config: JsonFile, default: int, key: str = "sliding_window_pattern") -> list[str]:
    """Read `layer_types`; where they are absent, every n-th layer has full attention, and the others have a window.

    n stands under `key`; absent, it is `default`.
    """
    types = read_layer_types(config)
    if types is not None:
        return types
    count = config.positive(key) if config.values.get(key) is not None else default
    return [FULL if (number + 1) % count == 0 else SLIDING for number in range(num_layers(config))]
