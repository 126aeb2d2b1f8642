"""Mistral (https://arxiv.org/abs/2310.06825): one window for all layers, or none."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
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

DEFAULT_WINDOW = 4096
"""What transformers takes for an absent `sliding_window`."""


def read(config: JsonFile) -> DecoderConfig:
    """Read the window of all layers; `layer_types` may say the same."""
    window = read_window(config, DEFAULT_WINDOW)
    read_layer_types(config, supported=(FULL if window is None else SLIDING,))
    layer = LayerConfig(
        mixer=read_attention(config, default_theta=None, window=bounded(window, config)), mlp=read_mlp(config)
    )
    return read_decoder(config, [layer] * num_layers(config))


MISTRAL = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    features="a window in all layers, or in none",
    examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
    read=read,
)
