"""MiniCPM3 (https://huggingface.co/openbmb/MiniCPM3-4B): latent attention, and multipliers of embeddings, of residuals
by the model's depth, and of logits by its width."""

from __future__ import annotations

import math

from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import NormConfig


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
