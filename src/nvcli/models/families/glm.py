"""GLM-4 (https://arxiv.org/abs/2406.12793): half of each head is rotated, in neighbouring pairs; `gate_up_proj` is
fused. GLM-4-0414 also norms the blocks' outputs. GLM-4.5 and its successors (https://arxiv.org/abs/2508.06471) have
some dense layers, then experts chosen by sigmoid scores with a correction, and a shared expert; GLM-4.7-Flash has
latent attention beside them, and in GLM-5 (https://arxiv.org/abs/2602.15763) tokens attend to a choice of keys."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.deepseek_experts import read_with_predictions
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import (
    choosing_layers,
    read_chosen_keys,
    read_latent_attention,
    with_indexers,
)
from nvcli.models.families.model_file import ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.vision.glm import read_glm4v_vision, read_glm_ocr_vision

NORMS_OF_GLM4 = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def read_glm(config: ModelFile) -> DecoderConfig:
    """Read GLM-4, with norms before the blocks."""
    return _read(config, LayerNorms(), qkv_bias=config.bias(default=True))


def read_glm4(config: ModelFile) -> DecoderConfig:
    """Read GLM-4-0414, with norms before and after the blocks."""
    return _read(config, NORMS_OF_GLM4, qkv_bias=config.bias(default=True))


def _read(config: ModelFile, norms: LayerNorms, *, qkv_bias: bool, default_partial: float = 0.5) -> DecoderConfig:
    attention = config.attention(
        qkv_bias=qkv_bias, rope=config.rope(is_interleaved=True, default_partial=default_partial)
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


def read_glm4v(config: ModelFile) -> DecoderConfig:
    """Read GLM-4-0414, whose heads are rotated whole unless the file says otherwise."""
    return _read(config, NORMS_OF_GLM4, qkv_bias=True, default_partial=1.0)


def read_glm_ocr(config: ModelFile) -> DecoderConfig:
    """Read GLM-OCR, without biases; a layer for multi-token prediction stays on disk."""
    decoder = _read(config, NORMS_OF_GLM4, qkv_bias=False, default_partial=1.0)
    return replace(decoder, layout=replace(decoder.layout, left=(f"model.layers.{config.num_layers()}.",)))


GLM_OCR = Family(
    name="GLM-OCR",
    architectures=("GlmOcrForConditionalGeneration",),
    features="GLM-4-0414 with a vision tower; positions of three axes",
    examples=("zai-org/GLM-OCR",),
    read=read_glm_ocr,
    read_vision=read_glm_ocr_vision,
)


def read_glm4_moe(config: ModelFile) -> DecoderConfig:
    """Read GLM-4.5, with half-rotated heads."""
    attention = config.attention(
        qk_norm="head" if config.get("use_qk_norm", bool, False) else None,
        qkv_bias=config.bias(),
        rope=config.rope(default_partial=0.5),
    )
    return read_with_predictions(config, attention)


GLM4_MOE = Family(
    name="GLM-4.5, 4.6",
    architectures=("Glm4MoeForCausalLM",),
    features="a mixture of experts after dense layers, and an expert that all tokens share; half of each head rotated",
    examples=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
    read=read_glm4_moe,
)
_TEXT_PARTS = {"glm4v_text": read_glm4v, "glm4v_moe_text": read_glm4_moe}
"""Readers of the decoders in files of Glm46V."""
GLM4V = Family(
    name="GLM-4.1V, GLM-4.6V-Flash",
    architectures=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    features="GLM-4-0414 with a vision tower; positions of three axes",
    examples=("zai-org/GLM-4.6V-Flash", "zai-org/GLM-4.1V-9B-Thinking"),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "glm4v_text"),
    read_vision=read_glm4v_vision,
)
GLM4V_MOE = Family(
    name="GLM-4.5V, GLM-4.6V",
    architectures=("Glm4vMoeForConditionalGeneration",),
    features="GLM-4.5 with a vision tower; positions of three axes",
    examples=("zai-org/GLM-4.6V", "zai-org/GLM-4.5V"),
    read=read_glm4_moe,
    read_vision=read_glm4v_vision,
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


def read_glm_moe_dsa(config: ModelFile) -> DecoderConfig:
    """Read GLM-5, with latent attention to chosen keys. Some layers may take the choice of the layer before them
    (https://arxiv.org/abs/2603.12201)."""
    attention = read_latent_attention(config, is_interleaved=config.get("rope_interleave", bool, True))
    chooser = read_chosen_keys(config, attention, is_interleaved=True)
    other = replace(chooser, indexer=None)
    mixers = [chooser if chooses else other for chooses in choosing_layers(config)]
    return with_indexers(read_with_predictions(config, chooser, config.sparse_layers(), mixers))


GLM_MOE_DSA = Family(
    name="GLM-5, 5.1",
    architectures=("GlmMoeDsaForCausalLM",),
    features="as GLM-4.7-Flash; tokens attend to keys that an indexer chooses (DSA)",
    examples=("zai-org/GLM-5", "zai-org/GLM-5.1-FP8"),
    read=read_glm_moe_dsa,
    defaults={"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "index_n_heads": 32},
)
