"""Muse Glimmer (https://huggingface.co/meta-models/Muse-Glimmer-30B) and Muse Spark
(https://huggingface.co/meta-models/Muse-Spark-Open-816B-A42B): gated attention with windows, full without rotary
positions in every fourth layer, and normed embeddings. Glimmer has norms on both sides of each block; Spark has gates
of the residual stream, and experts that compute with latent vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nvcli.kernels.residual_gate_settings import ResidualGates
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import NORMS_ON_BOTH_SIDES
from nvcli.models.families.model_file import SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig, OutputGate
from nvcli.models.mixers.experts import FROM_LATENTS, LATENT_NORM, RESULT_SCALE, TO_LATENTS, ExpertsConfig
from nvcli.models.vision.muse import read_muse_vision

_GATES = (".self_attn.gate_proj", ".self_attn.g_proj")
_LAYOUT = CheckpointLayout(renamed=(_GATES,))
_SPARK_LAYOUT = CheckpointLayout(
    renamed=(
        _GATES,
        (".pre_expert_proj.", f".{TO_LATENTS}."),
        (".pre_expert_norm.", f".{LATENT_NORM}."),
        (".experts.post_expert_norm.", f".{RESULT_SCALE}."),
        (".post_expert_proj.", f".{FROM_LATENTS}."),
        (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    )
)
_FULL_INTERVAL = 4


def read(config: ModelFile) -> DecoderConfig:
    """Read the text part of Muse Glimmer. Weights of the layers' norms are stored as differences from 1; those of heads
    and embeddings have none."""
    norm = config.rms_norm(weight_offset=1.0)
    eps_after = config.positive_number("post_norm_eps", 1e-8)
    norms = replace(NORMS_ON_BOTH_SIDES, epsilons=(norm.eps, eps_after, norm.eps, eps_after))
    mlp = config.mlp(key="hidden_activation")
    layers = (
        LayerConfig(mixer=attention, mlp=mlp, norms=norms)
        for attention in _attention(config, config.positive_number("qk_scale_factor", 3.87))
    )
    return _decoder(config, layers, config.positive_number("output_multiplier", 26**-0.5), layout=_LAYOUT)


def read_spark(config: ModelFile) -> DecoderConfig:
    """Read the text part of Muse Spark. By default all layers have experts; results of attention are normed head by
    head, and results of both blocks before they are added to the stream."""
    output_multiplier = config.positive_number("output_multiplier", 32**-0.5)
    norms = LayerNorms(before_mlp=NORMS_ON_BOTH_SIDES.before_mlp)
    mixers = _attention(config, config.positive_number("qk_scale_factor", 5.4730064863875), norms_results=True)
    is_sparse = config.sparse_layers(default=0)
    experts = _experts(config, output_multiplier) if any(is_sparse) else None
    layers = (
        LayerConfig(mixer=attention, mlp=experts if sparse else config.mlp(), norms=norms)
        for attention, sparse in zip(mixers, is_sparse, strict=True)
    )
    gates = ResidualGates(
        temperature=config.positive_number("residual_gate_temperature", 0.3),
        norm_eps=config.positive_number("post_norm_eps", 1e-8),
    )
    return _decoder(config, layers, output_multiplier, residual_gates=gates, layout=_SPARK_LAYOUT)


def _experts(config: ModelFile, router_factor: float) -> ExpertsConfig:
    return config.experts(
        config.sigmoid_routing(keys=("num_local_experts",)),
        has_correction=True,
        has_wide_router=True,
        router_factor=router_factor,
        latent_size=config.positive("moe_hidden_size", 4096),
        results_eps=config.positive_number("post_norm_eps", 1e-8),
    )


def _attention(config: ModelFile, query_factor: float, **traits: Any) -> Iterator[AttentionConfig]:
    """Read the attention of each layer. By default the last layer and every fourth one before it has full attention and
    does not rotate."""
    count = config.num_layers()
    is_full = [(count - 1 - number) % _FULL_INTERVAL == 0 for number in range(count)]
    kinds = config.layer_kinds(lambda number: is_full[number])
    attention = config.attention(
        scale=query_factor * config.head_dim() ** -0.5,
        qk_norm="head",
        weighs_norms=False,
        bias=config.bias(),
        gate=OutputGate(),
        rope=config.rope(),
        **traits,
    )
    window = config.bounded(config.window(2048))
    for kind, rotates in zip(kinds, _rotating_layers(config, is_full), strict=True):
        yield replace(attention, rope=attention.rope if rotates else None, window=window if kind == SLIDING else None)


def _rotating_layers(config: ModelFile, is_full: Sequence[bool]) -> list[bool]:
    """Read `layer_rope_theta`, of which, as in transformers, only zeros count: those layers do not rotate."""
    thetas = config.of_layers("layer_rope_theta")
    return [not full for full in is_full] if thetas is None else [theta != 0 for theta in thetas]


def _decoder(
    config: ModelFile, layers: Iterator[LayerConfig], output_multiplier: float, **settings: Any
) -> DecoderConfig:
    return config.decoder(
        layers,
        norm=config.rms_norm(weight_offset=1.0),
        last_norm=config.rms_norm(),
        embedding_norm=replace(config.rms_norm(), has_weight=False),
        logit_scale=output_multiplier,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 20.0),
        **settings,
    )


MUSE_GLIMMER = Family(
    name="Muse Glimmer",
    architectures=("MuseGlimmerForConditionalGeneration",),
    features="gated attention, full without rotary positions in every fourth layer; a vision tower",
    examples=("meta-models/Muse-Glimmer-30B",),
    read=read,
    read_vision=read_muse_vision,
)
MUSE_SPARK = Family(
    name="Muse Spark",
    architectures=("MuseSparkForConditionalGeneration",),
    features="Muse Glimmer's attention, a gated residual stream, experts of latent vectors; text alone",
    examples=("meta-models/Muse-Spark-Open-816B-A42B",),
    read=read_spark,
    keys={"n_routed_experts": "num_local_experts"},
    defaults={"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
)
