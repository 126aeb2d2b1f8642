"""Short ways to what tests ask of a ModelConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nvcli.models.config import ModelConfig
from nvcli.models.layer_config import index_kinds
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.rope_config import RopeConfig


def attention_of(config: ModelConfig, layer: int = 0) -> AttentionConfig:
    """The attention of one layer."""
    attention = config.layers[layer].mixer
    assert isinstance(attention, AttentionConfig)
    return attention


def rope_of(config: ModelConfig, layer: int = 0) -> RopeConfig:
    """The rope of one layer, which has one."""
    rope = attention_of(config, layer).rope
    assert rope is not None
    return rope


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer."""
    return tuple(attention_of(config, layer).window for layer in range(config.num_layers))


def with_windows(config: ModelConfig, windows: Sequence[int | None]) -> ModelConfig:
    """The same model with other windows."""
    layers = (
        dataclasses.replace(layer, mixer=dataclasses.replace(attention_of(config, number), window=window))
        for number, (layer, window) in enumerate(zip(config.layers, windows, strict=True))
    )
    kinds, kind_of_layer = index_kinds(layers)
    decoder = dataclasses.replace(config.decoder, layer_kinds=kinds, kind_of_layer=kind_of_layer)
    return dataclasses.replace(config, decoder=decoder)
