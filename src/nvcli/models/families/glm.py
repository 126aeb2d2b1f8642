"""GLM-4 (https://arxiv.org/abs/2406.12793): half of each head is rotated, in neighbouring pairs; `gate_up_proj` is
fused. GLM-4-0414 also norms what the blocks give."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.reading import num_layers, read_attention, read_decoder, read_mlp
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.rope_config import read_rope

_GLM4_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def read_glm(config: JsonFile) -> DecoderConfig:
    """Read norms before the blocks."""
    return _read(config, LayerNorms())


def read_glm4(config: JsonFile) -> DecoderConfig:
    """Read norms before and behind the blocks."""
    return _read(config, _GLM4_NORMS)


def _read(config: JsonFile, norms: LayerNorms) -> DecoderConfig:
    attention = read_attention(
        config,
        default_theta=None,
        rope=lambda head_dim: read_rope(
            config, head_dim=head_dim, default_theta=10_000.0, is_interleaved=True, default_partial=0.5
        ),
        qkv_bias=config.get("attention_bias", bool, True),
    )
    layer = LayerConfig(mixer=attention, mlp=read_mlp(config), norms=norms)
    return read_decoder(config, [layer] * num_layers(config))


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
    features="half of each head rotated, in pairs; norms before and behind each block",
    examples=("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
    read=read_glm4,
)
