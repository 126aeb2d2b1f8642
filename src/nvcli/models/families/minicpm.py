"""MiniCPM3 (https://huggingface.co/openbmb/MiniCPM3-4B): latent attention, and multipliers of embeddings, of residuals
by the model's depth, and of logits by its width. MiniCPM-V 4.6, 4.7 and MiniCPM-OCR: Qwen 3.5 after a vision tower."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import ModelFile, read_by_type
from nvcli.models.families.qwen_hybrid import QWEN3_5, read_qwen3_5, read_qwen3_5_moe
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.vision.minicpm import read_minicpm4_7_vision, read_minicpm_vision


def read_minicpm3(config: ModelFile) -> DecoderConfig:
    """Read the multipliers. As in Granite, the residual stream is kept divided by the blocks' multiplier."""
    hidden_size, count = config.positive("hidden_size"), config.num_layers()
    value_dim = config.positive("v_head_dim", hidden_size // config.positive("num_attention_heads"))
    residual = config.positive_number("scale_depth", math.sqrt(count)) / math.sqrt(count)
    attention = read_latent_attention(config.replacing(v_head_dim=value_dim), is_interleaved=False)
    return config.decoder(
        LayerConfig(mixer=attention, mlp=config.mlp(bias=config.mlp_bias())),
        norm=NormConfig(eps=config.positive_number("rms_norm_eps") / residual**2),
        embedding_scale=config.positive_number("scale_emb", 12.0) / residual,
        logit_scale=config.positive_number("dim_model_base", float(hidden_size)) / hidden_size,
    )


MINICPM3 = Family(
    name="MiniCPM3",
    architectures=("MiniCPM3ForCausalLM",),
    features="latent attention; multipliers of embeddings, residuals and logits",
    examples=("openbmb/MiniCPM3-4B",),
    read=read_minicpm3,
    ties_embeddings=True,
    defaults={"scale_depth": 1.4, "dim_model_base": 256},
)
_TEXT_PARTS = {"qwen3_5_text": read_qwen3_5, "qwen3_5_moe_text": read_qwen3_5_moe}

MINICPM_V4_6 = Family(
    name="MiniCPM-V 4.6",
    architectures=("MiniCPMV4_6ForConditionalGeneration",),
    features="Qwen 3.5 with a vision tower (SigLIP), which merges patches early and sees images as marked slices",
    examples=("openbmb/MiniCPM-V-4.6",),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "qwen3_5_text"),
    read_vision=read_minicpm_vision,
    defaults=QWEN3_5.defaults,
)
MINICPM_V4_7 = replace(
    MINICPM_V4_6,
    name="MiniCPM-V 4.7",
    architectures=("MiniCPMV4_7ForConditionalGeneration",),
    features="MiniCPM-V 4.6 with places of images and slices on one canvas",
    examples=("openbmb/MiniCPM-V-4.7-1B",),
    read_vision=read_minicpm4_7_vision,
)
MINICPM_OCR = replace(
    MINICPM_V4_6,
    name="MiniCPM-OCR",
    architectures=("MiniCPMOcrForConditionalGeneration",),
    features="MiniCPM-V 4.6 with four times as many tokens of images",
    examples=("openbmb/MiniCPM-OCR-1.0",),
    read_vision=partial(read_minicpm_vision, mode="4x"),
    ties_embeddings=True,
)
