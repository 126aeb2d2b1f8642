"""Command R7B and Command A (Cohere 2, https://arxiv.org/abs/2504.00698): attention and MLP side by side, LayerNorm
without a bias, and full attention without rotary positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mixer import NormConfig


def read(config: ModelFile) -> DecoderConfig:
    """Read windows and rotary positions; layers have either both or neither."""
    bias = config.bias()
    window = config.window(4096)
    attention = config.attention(
        default_theta=10_000.0,
        is_interleaved=True,
        window=config.bounded(window),
        qkv_bias=bias,
        o_bias=bias,
    )
    local = LayerConfig(mixer=attention, mlp=config.mlp(), norms=LayerNorms(before_mlp=None))
    full = replace(local, mixer=replace(attention, window=None, rope=None))
    kinds = config.every_nth_full(4)
    return config.decoder(
        (local if kind == SLIDING and window is not None else full for kind in kinds),
        norm=NormConfig(eps=config.positive_number("layer_norm_eps", 1e-5), kind="layer"),
        logit_scale=config.positive_number("logit_scale", 0.0625),
    )


COHERE2 = Family(
    name="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM",),
    features="attention and MLP side by side, windows in three of four layers",
    examples=("CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"),
    read=read,
    ties_embeddings=True,
)
