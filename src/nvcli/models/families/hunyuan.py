"""Hunyuan V1, V3 and V4 (https://github.com/Tencent-Hunyuan): normed queries and keys, in V1 after the rotation. V1 is
dense, or has experts in all layers; V3 has experts after a dense layer, chosen by sigmoid scores with a correction. V4
has latent attention with gates and sinks to chosen keys, and several residual streams."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import (
    CORRECTION_BESIDE_GATE,
    SHARED_EXPERT,
    read_experts,
    read_limit,
    shared_experts,
    with_limits,
)
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import (
    choosing_layers,
    read_chosen_keys,
    read_latent_attention,
    with_indexers,
)
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import GATE, AttentionConfig, OutputGate
from nvcli.models.rope_config import RopeConfig, rope_section
from nvcli.models.vision.hunyuan import read_hunyuan_v4_vision, read_hunyuan_vision

_V1_NAMES = (
    (".query_layernorm", ".q_norm"),
    (".key_layernorm", ".k_norm"),
    (".mlp.gate.wg", ".mlp.gate"),
    (".mlp.shared_mlp", ".mlp.shared_expert"),
)
_V3_NAMES = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    CORRECTION_BESIDE_GATE,
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
    SHARED_EXPERT,
)
_V4_NAMES = (
    (".hc_pre.hc_", ".hc_"),
    (".hc_attn_layer.hc_", ".attn_hc."),
    (".hc_mlp_layer.hc_", ".ffn_hc."),
    (".hc_head.hc_head_", ".hc_head."),
    (".hc_head.hc_", ".hc_head."),
    (".self_attn.linear_gate.", f".self_attn.{GATE}."),
    (".self_attn.gate_proj.", f".self_attn.{GATE}."),
    (".linear_gate.", ".gate_proj."),
    (".learnable_sink_param", ".sinks"),
    SHARED_EXPERT,
)
"""Names in published files, and in files saved by transformers where they differ: those call the gates of MLPs as
published files call the gates of attention."""


def read_v1(config: ModelFile) -> DecoderConfig:
    """Read the dense models."""
    layer = LayerConfig(mixer=_v1_attention(config), mlp=config.mlp())
    return config.decoder(layer, layout=CheckpointLayout(renamed=_V1_NAMES))


def read_v1_moe(config: ModelFile) -> DecoderConfig:
    """Read experts, and one of their size that all tokens share."""
    keys = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    config = config.replacing(**{key: _of_all_layers(config, key) for key in keys})
    if config.get("num_shared_expert", int, 1) != 1:
        raise config.error("num_shared_expert", f"{show(config.values['num_shared_expert'])} is not supported, only 1")
    if config.values["moe_intermediate_size"] not in (None, config.positive("intermediate_size")):
        raise config.error("moe_intermediate_size", "another size than `intermediate_size` is not supported")
    routing = config.routing(chosen_key="moe_topk", renormalise=True)
    experts = config.experts(routing, size_key="intermediate_size", shared=config.mlp())
    layer = LayerConfig(mixer=_v1_attention(config), mlp=experts)
    return config.decoder(layer, layout=CheckpointLayout(renamed=_V1_NAMES))


def _v1_attention(config: ModelFile) -> AttentionConfig:
    return config.attention(qk_norm="head", norms_last=True, bias=config.bias(), rope=_v1_rope(config))


def _v1_rope(config: ModelFile) -> RopeConfig:
    """Read the rotation; with `alpha`, what the files call dynamic is a larger base for sequences of any length."""
    rope = rope_section(config)
    if rope.values.get("alpha") is None:
        return config.rope()
    theta, head_dim = rope.positive_number("rope_theta", 10_000.0), config.head_dim()
    if head_dim == 2:
        raise config.error("head_dim", "2 is too small where `alpha` enlarges the base; allowed: from 4 on")
    return RopeConfig(rope_type="default", theta=theta * rope.positive_number("alpha") ** (head_dim / (head_dim - 2)))


def _of_all_layers(config: ModelFile, key: str) -> object:
    """Return the value of a key that may be a list with a value for each layer, which must all be the same."""
    found = config.values.get(key)
    if not isinstance(found, list):
        return found
    if len(found) != config.num_layers() or any(value != found[0] for value in found):
        raise config.error(key, f"{show(found)} is not one number for all {config.num_layers()} layers")
    return found[0]


def read_v3(config: ModelFile) -> DecoderConfig:
    """Read which layers have experts. A layer for multi-token prediction stays on disk."""
    attention = config.attention(qk_norm="head", bias=config.bias(), rope=config.rope(11_158_840.0))
    if config.mlp_bias():
        raise config.error("mlp_bias", "true is not supported beside experts, only false")
    routing = config.sigmoid_routing("router_scaling_factor", 2.826)
    shared = shared_experts(config.with_defaults({"num_shared_experts": 1}), "num_shared_experts")
    experts = config.experts(routing, has_correction=True, has_wide_router=True, shared=shared)
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in config.mlps(experts, config.sparse_layers()))
    layout = CheckpointLayout(renamed=_V3_NAMES, left=(f"model.layers.{config.num_layers()}.",))
    return config.decoder(layers, layout=layout)


def read_v4(config: ModelFile, *, has_vision: bool = False) -> DecoderConfig:
    """Read V4. Its index keys rotate their last numbers, with vision by pairs of neighbours, and all norms then have
    one epsilon. Layers for multi-token prediction stay on disk."""
    attention, norm = read_latent_attention(config, is_interleaved=has_vision), config.rms_norm()
    attention = replace(attention, has_sinks=True, gate=OutputGate())
    if has_vision:
        attention = replace(attention, norm_eps=norm.eps)
    chooser = read_chosen_keys(config, attention, is_interleaved=has_vision)
    assert chooser.indexer is not None
    num_first = chooser.indexer.head_dim - attention.rope_dim
    chooser = replace(chooser, indexer=replace(chooser.indexer, norm_eps=norm.eps, num_first=num_first))
    other = replace(chooser, indexer=None)
    mlps, limit = config.mlps(read_experts(config), config.sparse_layers()), read_limit(config)
    layers = (
        LayerConfig(mixer=chooser if chooses else other, mlp=with_limits(mlp, limit, None, kind="clamped_swiglu"))
        for chooses, mlp in zip(choosing_layers(config), mlps, strict=True)
    )
    eps, factor = config.positive_number("hc_eps", 1e-6), config.positive_number("hc_magnitude", 2.0)
    streams = config.streams(norm, factor=factor, result_eps=eps)
    layout = CheckpointLayout(renamed=_V4_NAMES, left=("model.mtp_layers.",))
    return with_indexers(config.decoder(layers, norm=norm, layout=layout, streams=streams))


HUNYUAN_V1 = Family(
    name="Hunyuan V1 dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    features="queries and keys normed after the rotation",
    examples=("tencent/Hunyuan-7B-Instruct", "tencent/Hunyuan-1.8B-Instruct"),
    read=read_v1,
)
HUNYUAN_OCR = Family(
    name="HunyuanOCR",
    architectures=("HunYuanVLForConditionalGeneration",),
    features="Hunyuan V1 with a vision tower; positions of four axes",
    examples=("tencent/HunyuanOCR",),
    read=read_v1,
    read_vision=read_hunyuan_vision,
    ties_embeddings=True,
    ties_as_text=True,
)
HUNYUAN_V1_MOE = Family(
    name="Hunyuan V1 MoE",
    architectures=("HunYuanMoEV1ForCausalLM",),
    features="queries and keys normed after the rotation; a mixture of experts, and one that all tokens share",
    examples=("tencent/Hunyuan-A13B-Instruct",),
    read=read_v1_moe,
)
HUNYUAN_V3 = Family(
    name="Hunyuan V3",
    architectures=("HYV3ForCausalLM",),
    features="normed queries and keys; a mixture of experts after a dense layer, and an expert that all tokens share",
    examples=("tencent/Hy3-preview",),
    read=read_v3,
)
_V4_DEFAULTS = {
    "index_n_heads": 16,
    "index_topk_freq": 4,
    "kv_lora_rank": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.827,
    "v_head_dim": 256,
}
HUNYUAN_V4 = Family(
    name="Hunyuan V4",
    architectures=("HYV4ForCausalLM",),
    features="latent attention with gates and sinks to chosen keys (DSA); experts; several residual streams (iHC)",
    examples=("tencent/Hy4-preview",),
    read=read_v4,
    defaults=_V4_DEFAULTS,
)
HUNYUAN_V4_VISION = replace(
    HUNYUAN_V4,
    name="Hunyuan V4 with vision",
    architectures=("HYV4VLForConditionalGeneration",),
    features="Hunyuan V4 with the vision tower of HunyuanOCR; positions of three axes",
    examples=("tencent/Hy4",),
    read=partial(read_v4, has_vision=True),
    read_vision=read_hunyuan_v4_vision,
    defaults={**_V4_DEFAULTS, "index_n_heads": 32, "q_lora_rank": 2048},
)
