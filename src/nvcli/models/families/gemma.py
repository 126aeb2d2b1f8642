"""Gemma 2 (https://arxiv.org/abs/2408.00118) and the text part of Gemma 3 (https://arxiv.org/abs/2503.19786).

Norms stand before and behind each block, their weights are kept as differences from 1, embeddings are scaled by the
root of the hidden size, and layers with a window stand between layers of full attention.
"""

from __future__ import annotations

from typing import Any

from nvcli.models.families.family import Family
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
    bounded,
    every_nth_full,
    read_attention,
    read_decoder,
    read_mlp,
    read_rms_norm,
    read_window,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.rope_config import RopeConfig, read_rope

GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


def read_gemma2(config: JsonFile) -> DecoderConfig:
    """Read soft caps on scores and logits; every second layer has full attention."""
    traits = {"soft_cap": _optional(config, "attn_logit_softcapping", 50.0)}
    kinds = {kind: _layer(config, kind, None, **traits) for kind in (SLIDING, FULL)}
    layers = [kinds[kind] for kind in every_nth_full(config, 2)]
    return _read_decoder(config, layers, logit_soft_cap=_optional(config, "final_logit_softcapping", 30.0))


def read_gemma3(config: JsonFile) -> DecoderConfig:
    """Read normed queries and keys, and two rotations; every sixth layer has full attention."""
    if config.get("use_bidirectional_attention", bool, False):
        raise config.error("use_bidirectional_attention", "true is not supported: the model generates no text")
    ropes = {SLIDING: _local_rope, FULL: _global_rope}
    traits = {"soft_cap": _optional(config, "attn_logit_softcapping", None), "qk_norm": "head"}
    kinds = {kind: _layer(config, kind, rope, **traits) for kind, rope in ropes.items()}
    layers = [kinds[kind] for kind in every_nth_full(config, 6)]
    return _read_decoder(config, layers, logit_soft_cap=_optional(config, "final_logit_softcapping", None))


def _layer(config: JsonFile, kind: str, rope: Any, **traits: Any) -> LayerConfig:
    bias = config.get("attention_bias", bool, False)
    attention = read_attention(
        config,
        default_theta=_LOCAL_THETA,
        rope=None if rope is None else lambda head_dim: rope(config, head_dim),
        scale=config.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
        window=bounded(read_window(config, 4096), config) if kind == SLIDING else None,
        qkv_bias=bias,
        o_bias=bias,
        **traits,
    )
    mlp = read_mlp(config, key="hidden_activation", default="gelu_pytorch_tanh")
    return LayerConfig(attention=attention, mlp=mlp, norms=GEMMA_NORMS)


def _read_decoder(config: JsonFile, layers: list[LayerConfig], *, logit_soft_cap: float | None) -> DecoderConfig:
    return read_decoder(
        config,
        layers,
        norm=read_rms_norm(config, weight_offset=1.0),
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        logit_soft_cap=logit_soft_cap,
    )


def _local_rope(config: JsonFile, head_dim: int) -> RopeConfig:
    """The rotation of layers with a window, which older files give by `rope_local_base_freq` alone."""
    theta = config.positive_number("rope_local_base_freq", _LOCAL_THETA)
    parameters = config.values.get("rope_parameters") or {}
    if not (isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict)):
        return RopeConfig(rope_type="default", theta=theta)
    return read_rope(config, head_dim=head_dim, default_theta=theta, layer_type=SLIDING)


def _global_rope(config: JsonFile, head_dim: int) -> RopeConfig:
    return read_rope(config, head_dim=head_dim, default_theta=_GLOBAL_THETA)


def _optional(config: JsonFile, key: str, default: float | None) -> float | None:
    """A number above zero, or None where the file says null."""
    if key not in config.values:
        return default
    return None if config.values[key] is None else config.positive_number(key)


GEMMA2 = Family(
    name="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    features="soft caps, windows in every other layer, norms before and behind each block",
    examples=("google/gemma-2-9b-it", "google/gemma-2-27b-it"),
    read=read_gemma2,
    ties_embeddings=True,
)
GEMMA3 = Family(
    name="Gemma 3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    features="windows in five of six layers, two rotations; of models with vision the text part",
    examples=("google/gemma-3-27b-it", "google/gemma-3-4b-it", "google/gemma-3-1b-it"),
    read=read_gemma3,
    ties_embeddings=True,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
)
