"""StableLM 2 (https://arxiv.org/abs/2402.17834): LayerNorm with biases, and a quarter of each head rotated."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms


def read(config: ModelFile) -> DecoderConfig:
    """Read attention and MLP one after the other, or side by side."""
    if config.get("qk_layernorm", bool, False):
        raise config.error("qk_layernorm", "true is not supported: each head would have a norm of its own")
    attention = config.attention(
        qkv_bias=config.get("use_qkv_bias", bool, False), rope=config.rope(default_partial=0.25)
    )
    norms = LayerNorms(before_mlp=None) if config.get("use_parallel_residual", bool, False) else LayerNorms()
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp(), norms=norms), norm=config.layer_norm())


STABLELM = Family(
    name="StableLM 2",
    architectures=("StableLmForCausalLM",),
    features="LayerNorm with biases, a quarter of each head rotated",
    examples=("stabilityai/stablelm-2-1_6b-chat", "stabilityai/stablelm-3b-4e1t"),
    read=read,
)
