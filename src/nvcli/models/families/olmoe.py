"""OLMoE (https://arxiv.org/abs/2409.02060): small experts in every layer, and norms on all heads together."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import num_layers, read_attention, read_decoder
from nvcli.models.families.reading_experts import read_experts, read_routing
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.validation import show


def read(config: JsonFile) -> DecoderConfig:
    """Read full attention in all layers."""
    if config.values.get("clip_qkv") is not None:
        raise config.error("clip_qkv", f"{show(config.values['clip_qkv'])} is not supported, only null")
    bias = config.get("attention_bias", bool, False)
    routing = read_routing(config, renormalise=config.get("norm_topk_prob", bool, False))
    layer = LayerConfig(
        mixer=read_attention(config, default_theta=10_000.0, qk_norm="row", qkv_bias=bias, o_bias=bias),
        mlp=read_experts(config, routing, size_key="intermediate_size"),
    )
    return read_decoder(config, [layer] * num_layers(config))


OLMOE = Family(
    name="OLMoE",
    architectures=("OlmoeForCausalLM",),
    features="a mixture of experts; norms on all heads together",
    examples=("allenai/OLMoE-1B-7B-0924-Instruct", "allenai/OLMoE-1B-7B-0125-Instruct"),
    read=read,
)
