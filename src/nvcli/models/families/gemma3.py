"""The text part of Gemma 3 (https://arxiv.org/abs/2503.19786): normed queries and keys, windows in five of six layers,
and a rotation of their own for these."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.gemma import read_gemma_decoder, read_gemma_layer
from nvcli.models.families.gemma2 import DEFAULT_WINDOW
from nvcli.models.families.reading import FULL, SLIDING, bounded, every_nth_full, read_optional, read_window
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.rope_config import RopeConfig, read_rope

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


def read(config: JsonFile) -> DecoderConfig:
    """Read two kinds of layers; every sixth layer has full attention."""
    if config.get("use_bidirectional_attention", bool, False):
        raise config.error("use_bidirectional_attention", "true is not supported: the model generates no text")
    kinds = {kind: _layer(config, kind) for kind in (SLIDING, FULL)}
    layers = (kinds[kind] for kind in every_nth_full(config, 6))
    return read_gemma_decoder(config, layers, logit_soft_cap=read_optional(config, "final_logit_softcapping", None))


def _layer(config: JsonFile, kind: str) -> LayerConfig:
    return read_gemma_layer(
        config,
        rope=lambda head_dim: (_local_rope if kind == SLIDING else _global_rope)(config, head_dim),
        scale=config.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
        window=bounded(read_window(config, DEFAULT_WINDOW), config) if kind == SLIDING else None,
        soft_cap=read_optional(config, "attn_logit_softcapping", None),
        qk_norm="head",
    )


def _local_rope(config: JsonFile, head_dim: int) -> RopeConfig:
    """The rotation of layers with a window, which older files give by `rope_local_base_freq` alone."""
    theta = config.positive_number("rope_local_base_freq", _LOCAL_THETA)
    parameters = config.values.get("rope_parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict):
        return read_rope(config, head_dim=head_dim, default_theta=theta, layer_type=SLIDING)
    return RopeConfig(rope_type="default", theta=theta)


def _global_rope(config: JsonFile, head_dim: int) -> RopeConfig:
    return read_rope(config, head_dim=head_dim, default_theta=_GLOBAL_THETA)


GEMMA3 = Family(
    name="Gemma 3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    features="windows in five of six layers, two rotations; of models with vision the text part",
    examples=("google/gemma-3-27b-it", "google/gemma-3-4b-it", "google/gemma-3-1b-it"),
    read=read,
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
