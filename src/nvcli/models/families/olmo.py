"""OLMo 2 (https://arxiv.org/abs/2501.00656) and OLMo 3: norms behind the blocks alone, and on all heads together."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
    bounded,
    every_nth_full,
    num_layers,
    read_attention,
    read_decoder,
    read_mlp,
    read_window,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.rope_config import read_rope

_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def read_olmo2(config: JsonFile) -> DecoderConfig:
    """Read full attention in all layers."""
    return read_decoder(config, [_layer(config, FULL, 10_000.0)] * num_layers(config))


def read_olmo3(config: JsonFile) -> DecoderConfig:
    """Read windows in three of four layers. Older files give one rotation, which is that of full attention where it is
    stretched."""
    kinds = {kind: _layer(config, kind, 500_000.0) for kind in (SLIDING, FULL)}
    return read_decoder(config, (kinds[kind] for kind in every_nth_full(config, 4)))


def _layer(config: JsonFile, kind: str, default_theta: float) -> LayerConfig:
    bias = config.get("attention_bias", bool, False)
    theta = config.positive_number("rope_theta", default_theta)
    source = config
    if kind == SLIDING and config.values.get("rope_scaling"):
        source = config.with_values({**config.values, "rope_scaling": None})
    attention = read_attention(
        config,
        default_theta=None,
        rope=lambda head_dim: read_rope(source, head_dim=head_dim, default_theta=theta, layer_type=kind),
        window=bounded(read_window(config, 4096), config) if kind == SLIDING else None,
        qk_norm="row",
        qkv_bias=bias,
        o_bias=bias,
    )
    return LayerConfig(mixer=attention, mlp=read_mlp(config), norms=_NORMS)


OLMO2 = Family(
    name="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    features="norms behind the blocks, and on all heads together",
    examples=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0325-32B-Instruct"),
    read=read_olmo2,
)
OLMO3 = Family(
    name="OLMo 3",
    architectures=("Olmo3ForCausalLM",),
    features="as OLMo 2, with windows in three of four layers",
    examples=("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-32B-Think"),
    read=read_olmo3,
)
