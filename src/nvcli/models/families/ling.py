"""Ling 3 (https://huggingface.co/inclusionAI/Ling-3.0-Flash): Kimi Delta Attention, whose decays are bounded, between
layers of latent attention with gated heads, and the experts of DeepSeek-V3 after dense layers, clamped in the last
layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.models.families.deepseek_experts import (
    layout_without_predictions,
    read_experts,
    read_limits,
    with_limits,
)
from nvcli.models.families.family import Family
from nvcli.models.families.kimi_linear import KEYS, NAMES_OF_DELTA, read_lowest_decay
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.kimi_delta import KimiDeltaConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.mtp_config import LAYER, NORM, MTPConfig, Names, names_of_layer

_NAMES = (
    (".word_embeddings.", ".embed_tokens."),
    (".attention.", ".self_attn."),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".gate.expert_bias", ".gate.e_score_correction_bias"),
    *NAMES_OF_DELTA,
)
"""Names in the published files and in those of transformers, and the decoder's."""
_COMPUTED: dict[str, str | bool] = {
    "gated_attention_proj_granularity_type": "head_wise",
    "mtp_use_kda": False,
    "no_kda_lora": True,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "use_qkv_bias": False,
}
"""Keys of which one value alone is computed."""


def read_ling(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers. The published decoder ignores `partial_rotary_factor`: what is
    meant to turn is rotated whole."""
    of_shared = config.positive("moe_intermediate_size") * config.get("n_shared_experts", int, 1)
    config.only(**_COMPUTED, moe_shared_expert_intermediate_size=of_shared)
    attention = read_latent_attention(config.replacing(partial_rotary_factor=None), is_interleaved=True)
    attention = replace(attention, gate=OutputGate(is_of_heads=True))
    mixers = {FULL: attention, LINEAR: _read_delta(config)}
    period, count = config.positive("layer_group_size", 6), config.num_layers()
    whole = count // period * period
    kinds = config.layer_kinds(lambda number: number % period == period - 1 or number >= whole, other=LINEAR)
    experts, norm = read_experts(config), config.rms_norm()
    layers = config.layers(kinds, mixers, _mlps(config, experts))
    layout = layout_without_predictions(config)
    head = None
    if config.get("num_nextn_predict_layers", int, 0) > 0:
        layer = LayerConfig(mixer=attention, mlp=experts)
        head = MTPConfig(layer=layer, norm=norm, stored_names=_names_of_head(layer, f"model.layers.{count}."))
    return config.decoder(layers, norm=norm, layout=replace(layout, renamed=(*layout.renamed, *_NAMES)), mtp=head)


def _mlps(config: ModelFile, experts: ExpertsConfig) -> Iterator[MLPConfig | ExpertsConfig]:
    limits, shared = (read_limits(config, f"{name}expert_swiglu_limit_list") for name in ("", "share_"))
    for mlp, *of_layer in zip(config.mlps(experts, config.sparse_layers(default=2)), limits, shared, strict=True):
        yield with_limits(mlp, *of_layer) if isinstance(mlp, ExpertsConfig) else mlp


def _read_delta(config: ModelFile) -> KimiDeltaConfig:
    is_bounded = config.get("kda_safe_gate", bool, True)
    return KimiDeltaConfig(
        num_heads=config.positive("num_attention_heads"),
        head_dim=config.with_names({"linear_head_dim": "head_dim"}).positive("head_dim", most=256),
        conv_taps=config.conv_taps("short_conv_kernel_size"),
        has_whole_gates=True,
        lowest_decay=read_lowest_decay(config, "kda_lower_bound") if is_bounded else None,
    )


def _names_of_head(layer: LayerConfig, stored: str) -> Names:
    own = {"attention.": f"{LAYER}.self_attn.", "final_layernorm.": f"{NORM}."}
    return (*names_of_layer(layer, stored), *((stored + found, wanted) for found, wanted in own.items()))


LING = Family(
    name="Ling 3",
    architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
    features="Kimi Delta Attention between layers of latent attention; a mixture of experts after dense layers",
    examples=("inclusionAI/Ling-3.0-Flash",),
    read=read_ling,
    keys=KEYS,
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "rope_theta": 6_000_000.0,
        "routed_scaling_factor": 2.5,
        "short_conv_kernel_size": 4,
    },
)
