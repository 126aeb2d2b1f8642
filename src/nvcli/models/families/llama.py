"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783), and the models of their architecture: Yi, DeepSeek-LLM, SmolLM2."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import FULL, num_layers, read_attention, read_decoder, read_layer_types, read_mlp
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read(config: JsonFile) -> DecoderConfig:
    """Read full attention in every layer, with biases where the file has them."""
    read_layer_types(config, supported=(FULL,))
    bias = config.get("attention_bias", bool, False)
    layer = LayerConfig(
        mixer=read_attention(config, default_theta=10_000.0, qkv_bias=bias, o_bias=bias),
        mlp=read_mlp(config, bias=config.get("mlp_bias", bool, False)),
    )
    return read_decoder(config, [layer] * num_layers(config))


def read_internlm3(config: JsonFile) -> DecoderConfig:
    """Read InternLM3, whose keys of biases have other names."""
    layer = LayerConfig(
        mixer=read_attention(
            config,
            default_theta=10_000.0,
            qkv_bias=config.get("qkv_bias", bool, False),
            o_bias=config.get("bias", bool, False),
        ),
        mlp=read_mlp(config, bias=config.get("bias", bool, False)),
    )
    return read_decoder(config, [layer] * num_layers(config))


INTERNLM3 = Family(
    name="InternLM3",
    architectures=("InternLM3ForCausalLM",),
    features="dynamic rope",
    examples=("internlm/internlm3-8b-instruct",),
    read=read_internlm3,
)
LLAMA = Family(
    name="Llama 2, 3",
    architectures=("LlamaForCausalLM",),
    features="also Yi, DeepSeek-LLM, SmolLM2 and others of this shape",
    examples=("meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "01-ai/Yi-1.5-9B-Chat"),
    read=read,
)
