"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama's layers with biased queries, keys and values."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import num_layers, read_attention, read_decoder, read_mlp
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read(config: JsonFile) -> DecoderConfig:
    """Read the biases, each of which has a key."""
    attention = read_attention(
        config,
        default_theta=10_000.0,
        qkv_bias=config.get("attention_bias", bool, True),
        o_bias=config.get("attention_out_bias", bool, False),
    )
    layer = LayerConfig(mixer=attention, mlp=read_mlp(config, bias=config.get("mlp_bias", bool, False)))
    return read_decoder(config, [layer] * num_layers(config))


SEED_OSS = Family(
    name="Seed-OSS",
    architectures=("SeedOssForCausalLM",),
    features="biased queries, keys and values",
    examples=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    read=read,
)
