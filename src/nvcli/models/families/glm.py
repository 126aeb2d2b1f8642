"""GLM-4 (https://arxiv.org/abs/2406.12793): half of each head is rotated, in neighbouring pairs; `gate_up_proj` is
fused. GLM-4-0414 also norms the blocks' outputs. GLM-4.5 and its successors (https://arxiv.org/abs/2508.06471) have
some dense layers, then experts chosen by sigmoid scores with a correction, and a shared expert; GLM-4.7-Flash has
latent attention beside them."""

from __future__ import annotations

from nvcli.models.families.deepseek_experts import read_with_predictions
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms

_GLM4_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def read_glm(config: ModelFile) -> DecoderConfig:
    """Read GLM-4, with norms before the blocks."""
    return _read(config, LayerNorms())


def read_glm4(config: ModelFile) -> DecoderConfig:
    """Read GLM-4-0414, with norms before and after the blocks."""
    return _read(config, _GLM4_NORMS)


def _read(config: ModelFile, norms: LayerNorms) -> DecoderConfig:
    attention = config.attention(
        default_theta=10_000.0,
        is_interleaved=True,
        default_partial=0.5,
        qkv_bias=config.bias(default=True),
    )
    layer = LayerConfig(mixer=attention, mlp=config.mlp(), norms=norms)
    return config.decoder(layer)


GLM = Family(
    name="GLM-4-9B",
    architectures=("GlmForCausalLM",),
    features="half of each head rotated, in pairs",
    examples=("zai-org/glm-4-9b-chat-hf",),
    read=read_glm,
)
GLM4 = Family(
    name="GLM-4-0414",
    architectures=("Glm4ForCausalLM",),
    features="half of each head rotated, in pairs; norms before and after each block",
    examples=("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
    read=read_glm4,
)


def read_glm4_moe(config: ModelFile) -> DecoderConfig:
    """Read GLM-4.5, with half-rotated heads."""
    attention = config.attention(
        default_theta=10_000.0,
        default_partial=0.5,
        qk_norm="head" if config.get("use_qk_norm", bool, False) else None,
        qkv_bias=config.bias(),
    )
    return read_with_predictions(config, attention)


GLM4_MOE = Family(
    name="GLM-4.5, 4.6",
    architectures=("Glm4MoeForCausalLM",),
    features="a mixture of experts after dense layers, and an expert that all tokens share; half of each head rotated",
    examples=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
    read=read_glm4_moe,
)


def read_glm4_moe_lite(config: ModelFile) -> DecoderConfig:
    """Read GLM-4.7-Flash, with latent attention."""
    attention = read_latent_attention(config, is_interleaved=config.get("rope_interleave", bool, True))
    return read_with_predictions(config, attention, config.sparse_layers())


GLM4_MOE_LITE = Family(
    name="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM",),
    features="latent attention; a mixture of experts after a dense layer, and an expert that all tokens share",
    examples=("zai-org/GLM-4.7-Flash",),
    read=read_glm4_moe_lite,
)
