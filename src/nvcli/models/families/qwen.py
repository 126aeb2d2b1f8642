"""Qwen2 and 2.5 (https://arxiv.org/abs/2407.10671) and Qwen3 dense (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.mistral import DEFAULT_WINDOW
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
    Windows,
    bounded,
    num_layers,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_window,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig

_DEFAULT_MAX_WINDOW_LAYERS = 28
"""What transformers takes for an absent `max_window_layers`."""


def read_qwen2(config: JsonFile) -> DecoderConfig:
    """Read biases on queries, keys and values."""
    return _read(config, read_attention(config, default_theta=None, qkv_bias=True))


def read_qwen3(config: JsonFile) -> DecoderConfig:
    """Read normed queries and keys. The head size must be there: it is not the heads' share of the hidden size."""
    config.positive("head_dim")
    bias = config.get("attention_bias", bool, False)
    attention = read_attention(config, default_theta=None, qk_norm="head", qkv_bias=bias, o_bias=bias)
    return _read(config, attention)


def _read(config: JsonFile, attention: AttentionConfig) -> DecoderConfig:
    mlp = read_mlp(config)
    windows = read_windows(config)
    return read_decoder(config, (LayerConfig(mixer=replace(attention, window=window), mlp=mlp) for window in windows))


def read_windows(config: JsonFile) -> Windows:
    """Read `sliding_window`, where `use_sliding_window` is set, for the layers that `layer_types` names
    `sliding_attention`; without `layer_types`, for all layers from `max_window_layers` on."""
    window = read_window(config, DEFAULT_WINDOW) if config.get("use_sliding_window", bool, False) else None
    types = read_layer_types(config, supported=(FULL,) if window is None else (FULL, SLIDING))
    if types is None:
        first = config.get("max_window_layers", int, _DEFAULT_MAX_WINDOW_LAYERS)
        types = [FULL if number < first else SLIDING for number in range(num_layers(config))]
    return tuple(bounded(window, config) if kind == SLIDING else None for kind in types)


QWEN2 = Family(
    name="Qwen2, 2.5",
    architectures=("Qwen2ForCausalLM",),
    features="biased queries, keys and values; windows in the later layers where they are switched on",
    examples=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct"),
    read=read_qwen2,
)
QWEN3 = Family(
    name="Qwen3 dense",
    architectures=("Qwen3ForCausalLM",),
    features="normed queries and keys",
    examples=("Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"),
    read=read_qwen3,
)
