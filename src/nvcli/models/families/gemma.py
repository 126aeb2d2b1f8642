"""Gemma (https://arxiv.org/abs/2403.08295), and what its successors have in common with it: norms whose weights are
kept as differences from 1, embeddings scaled by the root of the hidden size, and GELU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nvcli.models.families.family import Family
from nvcli.models.families.reading import num_layers, read_attention, read_decoder, read_mlp, read_rms_norm
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.rope_config import RopeConfig

NORMS_ON_BOTH_SIDES = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read(config: JsonFile) -> DecoderConfig:
    """Read full attention in all layers, and norms before the blocks."""
    return read_gemma_decoder(config, [read_gemma_layer(config, norms=LayerNorms())] * num_layers(config))


def read_gemma_layer(
    config: JsonFile,
    *,
    norms: LayerNorms = NORMS_ON_BOTH_SIDES,
    rope: Callable[[int], RopeConfig | None] | None = None,
    **traits: Any,
) -> LayerConfig:
    """Read one kind of layer; `rope` and `traits` are those of `read_attention`."""
    bias = config.get("attention_bias", bool, False)
    attention = read_attention(config, default_theta=10_000.0, rope=rope, qkv_bias=bias, o_bias=bias, **traits)
    mlp = read_mlp(config, key="hidden_activation", default="gelu_pytorch_tanh")
    return LayerConfig(mixer=attention, mlp=mlp, norms=norms)


def read_gemma_decoder(
    config: JsonFile, layers: Iterable[LayerConfig], *, logit_soft_cap: float | None = None
) -> DecoderConfig:
    """Make the decoder of these layers."""
    return read_decoder(
        config,
        layers,
        norm=read_rms_norm(config, weight_offset=1.0),
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        logit_soft_cap=logit_soft_cap,
    )


GEMMA = Family(
    name="Gemma",
    architectures=("GemmaForCausalLM",),
    features="norm weights as differences from 1, scaled embeddings",
    examples=("google/gemma-7b-it", "google/codegemma-7b-it"),
    read=read,
    ties_embeddings=True,
)
