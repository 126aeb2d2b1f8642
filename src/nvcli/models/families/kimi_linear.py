"""Kimi Delta Attention between layers of latent attention, with the experts of DeepSeek-V3 after dense layers: Kimi
Linear (https://arxiv.org/abs/2510.26692), without rotary positions, and Ling 3
(https://huggingface.co/inclusionAI/Ling-3.0-Flash), whose decays are bounded, with gated heads and with experts that
are clamped in the last layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.families.deepseek_experts import (
    layout_without_predictions,
    read_experts,
    read_limits,
    with_limits,
)
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.delta_net import KimiDeltaConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.mtp_config import LAYER, NORM, MTPConfig, Names, names_of_layer

SECTION = "linear_attn_config"
"""The part of config.json for Kimi Delta Attention."""
NAMES_OF_DELTA = ((".forget_gate.", "."), (".self_attn.conv1d.", ".self_attn.qkv_conv1d."))
"""Names of a layer's tensors in files of transformers, and in the decoder."""
KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of keys in published files → the names that are read."""
_COMPUTED: dict[str, str | int | bool] = {
    "attn_res_block_size": 0,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": 0,
}
"""Keys of which one value alone is computed; later models have others."""


def read_kimi_linear(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers."""
    config.only(**_COMPUTED)
    config.object(SECTION).only(use_full_rank_gate=False, gate_lower_bound=False)
    attention = read_latent_attention(config, is_interleaved=False)
    mixers = {FULL: replace(attention, rope=None), LINEAR: read_delta(config)}
    experts, kinds = read_experts(config), _layer_types(config)
    layers = config.layers(kinds, mixers, config.mlps(experts, config.sparse_layers()))
    layout = layout_without_predictions(config)
    return config.decoder(layers, layout=replace(layout, renamed=(*layout.renamed, *MIXTRAL_NAMES, *NAMES_OF_DELTA)))


def read_delta(config: ModelFile) -> KimiDeltaConfig:
    """Read the heads and the convolution, which published files have in a section of their own."""
    section = config.object(SECTION)
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    found = {key: (section, key) if section.has(key) else (config, own) for key, own in names.items()}
    (of_dim, dim_key), (of_heads, heads_key), (of_taps, taps_key) = found.values()
    return KimiDeltaConfig(
        num_heads=of_heads.positive(heads_key),
        head_dim=of_dim.positive(dim_key, most=256),
        conv_taps=of_taps.conv_taps(taps_key),
    )


def read_lowest_decay(config: ModelFile, key: str) -> float:
    """Read the lower bound of the logarithms of decays, by default -5."""
    lowest = config.get(key, float, -5.0)
    if lowest >= 0:
        raise config.error(key, f"{lowest:g} is not below zero")
    return lowest


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`; if they are absent, the lists of layers, which are counted from 1."""
    types = config.layer_types(supported=(FULL, LINEAR))
    if types is not None:
        return types
    section, count = config.object(SECTION), config.num_layers()
    kinds: dict[int, str] = {}
    for key, kind in (("kda_layers", LINEAR), ("full_attn_layers", FULL)):
        numbers = section.values.get(key)
        if not isinstance(numbers, list):
            raise section.error(key, f"{show(numbers)} is not a list")
        kinds |= {number: kind for number in numbers if isinstance(number, int)}
    if [*sorted(kinds)] != [*range(1, count + 1)]:
        raise section.error("kda_layers", f"with `full_attn_layers`, it does not name layers 1 to {count}")
    return [kinds[number] for number in range(1, count + 1)]


KIMI_LINEAR = Family(
    name="Kimi Linear",
    architectures=("KimiLinearForCausalLM",),
    features="Kimi Delta Attention between layers of latent attention without rotary positions; a mixture of experts "
    "after dense layers, and experts that all tokens share",
    examples=("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    read=read_kimi_linear,
    keys=KEYS,
)


_NAMES = (
    (".word_embeddings.", ".embed_tokens."),
    (".attention.", ".self_attn."),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".gate.expert_bias", ".gate.e_score_correction_bias"),
    *NAMES_OF_DELTA,
)
"""Names in the published files and in those of transformers, and the decoder's."""
_LING_COMPUTED: dict[str, str | bool] = {
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
    config.only(**_LING_COMPUTED, moe_shared_expert_intermediate_size=of_shared)
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
