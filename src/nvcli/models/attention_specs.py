"""The attention of a model on one rank: the kind of each layer, as attention backends and the KV cache take it."""

from __future__ import annotations

from nvcli.attention.spec import AttentionSpec, StateSpec
from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig
from nvcli.models.kv_groups import kv_groups
from nvcli.models.layer_config import AttentionConfig, DeltaNetConfig

LayerSpec = AttentionSpec | StateSpec
"""What a layer keeps in the KV cache."""


def layer_specs(config: ModelConfig, tensor_parallel_size: int, stage: Stage = WHOLE) -> tuple[LayerSpec, ...]:
    """Return the attention kind or the state of each layer of a stage, on one of its ranks. Layers that attend alike
    and are in one KV group have equal ones."""
    numbers, layers, owners = stage.layers(config.num_layers), config.layers, config.decoder.kv_owners
    groups = kv_groups(config, stage)
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return tuple(
        _layer_spec(layers[number].attention, group_of[owners[number] - numbers.start], tensor_parallel_size)
        for number in numbers
    )


def _layer_spec(attention: AttentionConfig | DeltaNetConfig, group: int, tensor_parallel_size: int) -> LayerSpec:
    if isinstance(attention, DeltaNetConfig):
        return StateSpec(
            conv_shape=attention.conv_shape(tensor_parallel_size),
            recurrent_shape=attention.recurrent_shape(tensor_parallel_size),
            kv_group=group,
        )
    return AttentionSpec(
        num_heads=attention.num_heads // tensor_parallel_size,
        num_kv_heads=attention.kv_heads_per_rank(tensor_parallel_size),
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        soft_cap=attention.soft_cap,
        has_sinks=attention.has_sinks,
        kv_group=group,
    )
