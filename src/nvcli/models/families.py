"""The families of dense decoders that can be served, and what tells one from another. Torch-free.

All of them are pre-norm decoders with grouped-query attention, rotary positions and a gated MLP; `dense.py` computes
them, and `geometry.py` lists their tensors. A family here is a function that reads the rest from config.json. To add
one, write such a function and name it in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvcli.models.json_file import JsonFile
from nvcli.validation import show

_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28
"""What transformers takes for `sliding_window` and `max_window_layers` where they are absent."""
MAX_LAYERS = 10_000
"""The most layers of a model; more than any has, so few that a list of them is small."""
_FULL, _SLIDING = "full_attention", "sliding_attention"

Windows = tuple[int | None, ...]
"""For each layer how many tokens attention sees, the token's own included; None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What differs between the layers of dense decoders."""

    head_dim: int
    layer_windows: Windows
    qk_norm: bool = False
    """Whether each head of the queries and keys is normed (RMSNorm) before it is rotated."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    default_rope_theta: float | None = None
    """What an absent `rope_theta` stands for; None: it must be there."""


Family = Callable[[JsonFile], Traits]


def llama(config: JsonFile) -> Traits:
    """Llama 2 and 3 (https://arxiv.org/abs/2407.21783), and models of their architecture."""
    bias = config.get("attention_bias", bool, False)
    return Traits(
        head_dim=_head_dim(config),
        layer_windows=_no_windows(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.get("mlp_bias", bool, False),
        default_rope_theta=10_000.0,
    )


def mistral(config: JsonFile) -> Traits:
    """Mistral (https://arxiv.org/abs/2310.06825): one window for all layers."""
    return Traits(head_dim=_head_dim(config), layer_windows=_uniform_windows(config))


def qwen2(config: JsonFile) -> Traits:
    """Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on queries, keys and values."""
    return Traits(head_dim=_head_dim(config), layer_windows=_qwen_windows(config), qkv_bias=True)


def qwen3(config: JsonFile) -> Traits:
    """Qwen3 dense (https://arxiv.org/abs/2505.09388): normed queries and keys."""
    bias = config.get("attention_bias", bool, False)
    return Traits(
        head_dim=_even(config, config.positive("head_dim")),  # it is not hidden_size / heads, so there is no guessing
        layer_windows=_qwen_windows(config),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
"""Families by the architecture name of config.json."""


def _head_dim(config: JsonFile) -> int:
    """`head_dim`, or where it is absent or null the heads' share of the hidden size."""
    if config.values.get("head_dim") is not None:
        return _even(config, config.positive("head_dim"))
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    if hidden_size % num_heads:
        raise config.error("head_dim", f"missing, and {num_heads} heads do not divide the hidden size {hidden_size}")
    return _even(config, hidden_size // num_heads)


def _even(config: JsonFile, head_dim: int) -> int:
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embedding pairs dimensions")
    return head_dim


def _no_windows(config: JsonFile) -> Windows:
    """Full attention in every layer."""
    _layer_types(config, supported=(_FULL,))
    return (None,) * config.positive("num_hidden_layers", most=MAX_LAYERS)


def _uniform_windows(config: JsonFile) -> Windows:
    """`sliding_window` in every layer, unless it is null."""
    window = _window(config)
    _layer_types(config, supported=(_FULL if window is None else _SLIDING,))
    return (_bounded(window, config),) * config.positive("num_hidden_layers", most=MAX_LAYERS)


def _qwen_windows(config: JsonFile) -> Windows:
    """`sliding_window`, where `use_sliding_window` is set, in the layers that `layer_types` names `sliding_attention`;
    without `layer_types` in all layers from `max_window_layers` on."""
    num_layers = config.positive("num_hidden_layers", most=MAX_LAYERS)
    window = _window(config) if config.get("use_sliding_window", bool, False) else None
    types = _layer_types(config, supported=(_FULL,) if window is None else (_FULL, _SLIDING))
    if types is None:
        first = config.get("max_window_layers", int, _DEFAULT_MAX_WINDOW_LAYERS)
        types = [_FULL if number < first else _SLIDING for number in range(num_layers)]
    if len(types) != num_layers:
        raise config.error("layer_types", f"names {len(types)} layers, and `num_hidden_layers` is {num_layers}")
    return tuple(_bounded(window, config) if kind == _SLIDING else None for kind in types)


def _window(config: JsonFile) -> int | None:
    """`sliding_window`, which turns windows off where it is null."""
    if "sliding_window" not in config.values:
        return _DEFAULT_WINDOW
    return None if config.values["sliding_window"] is None else config.positive("sliding_window")


def _bounded(window: int | None, config: JsonFile) -> int | None:
    """The window, or None where it sees as much as full attention of the longest sequence does."""
    return None if window is None or window >= config.positive("max_position_embeddings") else window


def _layer_types(config: JsonFile, *, supported: tuple[str, ...]) -> list[str] | None:
    """`layer_types`, or None where it is absent. Raises LoadError where it names a type that is not in `supported`."""
    types = config.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise config.error("layer_types", f"{show(types)} is not a list")
    if others := [kind for kind in types if kind not in supported]:
        other = show(others[0]).strip('"')
        raise config.error("layer_types", f"{other} is not supported here, only {' and '.join(supported)}")
    return types
