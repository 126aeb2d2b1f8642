"""Gemma (https://arxiv.org/abs/2403.08295), Gemma 2 (https://arxiv.org/abs/2408.00118) and Gemma 3
(https://arxiv.org/abs/2503.19786).

All have norm weights stored as differences from 1, embeddings scaled by the square root of the hidden size, and GELU.
Gemma 2 has soft caps, and windows in every other layer; Gemma 3 has normed queries and keys, and windows with a
rotation of their own in five of six layers. PaliGemma (https://arxiv.org/abs/2407.07726) is Gemma or Gemma 2 after a
vision tower, whose prompts with images attend both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.rope_config import RopeConfig
from nvcli.models.vision.siglip import read_gemma3_vision, read_paligemma_vision

_BOTH_WAYS = "use_bidirectional_attention"
NORMS_ON_BOTH_SIDES = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read_gemma(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers, and norms before the blocks."""
    _check_causal(config)
    return read_gemma_decoder(config, read_gemma_layer(config, norms=LayerNorms(), rope=config.rope()))


def _check_causal(config: ModelFile) -> None:
    """Raise LoadError for a file that asks for attention both ways, which transformers computes for some batches."""
    if config.get(_BOTH_WAYS, bool, False):
        raise config.error(_BOTH_WAYS, "true is not supported: what transformers computes depends on padding")


def read_gemma_layer(config: ModelFile, *, norms: LayerNorms = NORMS_ON_BOTH_SIDES, **traits: Any) -> LayerConfig:
    """Read one kind of layer; `traits` are the arguments of `ModelFile.attention`."""
    attention = config.attention(bias=config.bias(), **traits)
    mlp = config.mlp(key="hidden_activation", default="gelu_pytorch_tanh")
    return LayerConfig(mixer=attention, mlp=mlp, norms=norms)


def read_gemma_decoder(
    config: ModelFile, layers: LayerConfig | Iterable[LayerConfig], *, logit_soft_cap: float | None = None
) -> DecoderConfig:
    """Make the decoder of these layers."""
    return config.decoder(
        layers,
        norm=config.rms_norm(weight_offset=1.0),
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        logit_soft_cap=logit_soft_cap,
    )


GEMMA = Family(
    name="Gemma",
    architectures=("GemmaForCausalLM",),
    features="norm weights as differences from 1, scaled embeddings",
    examples=("google/gemma-7b-it", "google/codegemma-7b-it"),
    read=read_gemma,
    ties_embeddings=True,
)


DEFAULT_WINDOW = 4096
"""The default of `sliding_window` in transformers."""


def read_gemma2(config: ModelFile) -> DecoderConfig:
    """Read soft caps on scores and logits; every second layer has full attention."""
    return _read_gemma2(config, NORMS_ON_BOTH_SIDES)


def read_vault_gemma(config: ModelFile) -> DecoderConfig:
    """Read Gemma 2 without norms after the blocks."""
    return _read_gemma2(config, LayerNorms(before_mlp=NORMS_ON_BOTH_SIDES.before_mlp))


def _read_gemma2(config: ModelFile, norms: LayerNorms) -> DecoderConfig:
    _check_causal(config)
    kinds = {
        kind: read_gemma_layer(
            config,
            norms=norms,
            scale=config.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
            window=config.window_of(kind, DEFAULT_WINDOW),
            soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
            rope=config.rope(),
        )
        for kind in (SLIDING, FULL)
    }
    layers = (kinds[kind] for kind in config.every_nth_full(2))
    return read_gemma_decoder(config, layers, logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0))


GEMMA2 = Family(
    name="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    features="soft caps, windows in every other layer, norms before and after each block",
    examples=("google/gemma-2-9b-it", "google/gemma-2-27b-it"),
    read=read_gemma2,
    ties_embeddings=True,
)


VAULT_GEMMA = Family(
    name="VaultGemma",
    architectures=("VaultGemmaForCausalLM",),
    features="Gemma 2 without norms after the blocks",
    examples=("google/vaultgemma-1b",),
    read=read_vault_gemma,
    ties_embeddings=True,
)
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


def read_gemma3(config: ModelFile) -> DecoderConfig:
    """Read two kinds of layers; every sixth layer has full attention. EmbeddingGemma's tokens attend both ways, and its
    `sliding_window` counts both."""
    kinds = {kind: _layer(config, kind) for kind in (SLIDING, FULL)}
    layers = (kinds[kind] for kind in config.every_nth_full(6))
    return read_gemma_decoder(config, layers, logit_soft_cap=config.optional_number("final_logit_softcapping", None))


def _layer(config: ModelFile, kind: str) -> LayerConfig:
    both_ways = config.get(_BOTH_WAYS, bool, False)
    window = config.window(DEFAULT_WINDOW) if kind == SLIDING else None
    return read_gemma_layer(
        config,
        scale=config.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
        window=config.bounded(window // 2 + 1 if window is not None and both_ways else window),
        both_ways=both_ways,
        soft_cap=config.optional_number("attn_logit_softcapping", None),
        qk_norm="head",
        rope=read_local_rope(config) if kind == SLIDING else config.rope(_GLOBAL_THETA),
    )


def read_local_rope(config: ModelFile) -> RopeConfig:
    """Read the rotation of layers with a window; older files give only `rope_local_base_freq`."""
    theta = config.positive_number("rope_local_base_freq", _LOCAL_THETA)
    parameters = config.values.get("rope_parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict):
        return config.rope(theta, layer_type=SLIDING)
    return RopeConfig(rope_type="default", theta=theta)


GEMMA3 = Family(
    name="Gemma 3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    features="windows in five of six layers, two rotations; a vision tower, to whose images tokens attend both ways",
    examples=("google/gemma-3-27b-it", "google/gemma-3-1b-it", "google/embeddinggemma-300m"),
    read=read_gemma3,
    read_vision=read_gemma3_vision,
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


def _read_short_gemma2(config: ModelFile) -> DecoderConfig:
    """Read Gemma 2 for sequences that no window cuts: windows do not hide the tokens of a prompt from each other."""
    found = read_gemma2(config.replacing(layer_types=[FULL] * config.num_layers()))
    return replace(found, max_positions=config.positive("sliding_window", DEFAULT_WINDOW, least=2))


_IMAGES_AND_TEXT = (  # as transformers' processor has them
    "{%- for message in messages if message.content is not string %}"
    "{% for part in message.content if part.type == 'image' %}<image>{% endfor %}{% endfor %}{{ bos_token }}"
    "{%- for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{{ '\n' }}"
)
PALIGEMMA = Family(
    name="PaliGemma",
    architectures=("PaliGemmaForConditionalGeneration",),
    features="Gemma or Gemma 2 with a vision tower (SigLIP); all tokens of a prompt with images attend to each other",
    examples=("google/paligemma2-3b-mix-448", "google/paligemma-3b-mix-224"),
    read=lambda config: read_by_type(  # tokens of text alone attend causally
        config.replacing(**{_BOTH_WAYS: None}), {"gemma": read_gemma, "gemma2": _read_short_gemma2}, "gemma"
    ),
    read_vision=read_paligemma_vision,
    chat_template=_IMAGES_AND_TEXT,
    ties_embeddings=True,
    defaults={"head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
)
