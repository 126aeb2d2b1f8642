"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama's layers with biased queries, keys and values."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read(config: ModelFile) -> DecoderConfig:
    """Read the biases, each of which has a key of its own."""
    attention = config.attention(
        qkv_bias=config.bias(default=True), o_bias=config.get("attention_out_bias", bool, False), rope=config.rope()
    )
    layer = LayerConfig(mixer=attention, mlp=config.mlp(bias=config.mlp_bias()))
    return config.decoder(layer)


SEED_OSS = Family(
    name="Seed-OSS",
    architectures=("SeedOssForCausalLM",),
    features="biased queries, keys and values",
    examples=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    read=read,
)
