"""LFM2 (https://arxiv.org/abs/2511.23404): gated short convolutions in most layers, attention in the others, each with
a gated MLP or, in LFM2-MoE, with experts in all but the first layers. LFM3 has attention with windows too, gates for
its heads, and norms after the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.kernels.whole_numbers import round_up
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import first_layers_dense
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig, OutputGate
from nvcli.models.mixers.mixer import FeedForward, Mixer, NormConfig
from nvcli.models.mixers.short_conv import ShortConvConfig
from nvcli.models.vision.lfm3 import read_lfm3_vision
from nvcli.models.vision.siglip import read_lfm2_vision

_CONV = "conv"
_LAYOUT = CheckpointLayout(
    renamed=(
        (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".feed_forward.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
        (".self_attn.out_proj.", ".self_attn.o_proj."),
        (".self_attn.gate_proj.", ".self_attn.g_proj."),
        (".q_layernorm.", ".q_norm."),
        (".k_layernorm.", ".k_norm."),
        (".conv.in_proj.", ".conv.bcx_proj."),
        ("model.embedding_norm.", "model.norm."),
    )
)
_NORMS = LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm")
_LFM3_NORMS = LayerNorms(
    before_attention="operator_norm",
    after_attention="post_operator_norm",
    before_mlp="ffn_norm",
    after_mlp="post_ffn_norm",
)
_LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def read_lfm2(config: ModelFile) -> DecoderConfig:
    """Read a dense model, whose MLPs may be smaller than `intermediate_size` says."""
    size = config.positive("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", bool, True):
        unit = config.positive("block_multiple_of", 256)
        size = int(config.positive_number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = round_up(size, unit)
    return _read(config, config.replacing(intermediate_size=size).mlp())


def read_lfm2_moe(config: ModelFile) -> DecoderConfig:
    """Read a mixture of experts, chosen by sigmoid scores with a correction."""
    routing = config.sigmoid_routing(renormalise=config.get("norm_topk_prob", bool, True))
    experts = config.experts(routing, has_correction=config.get("use_expert_bias", bool, True))
    return _read(config, first_layers_dense(config, experts, "num_dense_layers", 2))


def read_lfm3(config: ModelFile) -> DecoderConfig:
    """Read a dense model with layers of full attention, of attention with windows and of convolutions."""
    kinds = config.layer_types(supported=(FULL, SLIDING, _CONV)) or [
        FULL if number % 4 == 2 else SLIDING if number % 4 == 0 and number > 0 else _CONV
        for number in range(config.num_layers())
    ]
    kinds = config.with_full(kinds)
    mixers: dict[str, Mixer] = {_CONV: _conv(config)}
    mixers |= {kind: _lfm3_attention(config, kind) for kind in (FULL, SLIDING) if kind in kinds}
    norms = _LFM3_NORMS if config.get("use_sandwich_norm", bool, True) else _NORMS
    return _decoder(config, config.layers(kinds, mixers, config.mlp(), norms))


def _lfm3_attention(config: ModelFile, kind: str) -> AttentionConfig:
    return config.attention(
        window=config.window_of(kind, 256),
        qk_norm="head",
        bias=config.bias(),
        gate=OutputGate(is_of_heads=True) if config.get("use_attention_gate", bool, True) else None,
        rope=config.rope(default_theta=None, layer_type=kind),
    )


def _read(config: ModelFile, mlps: FeedForward | Sequence[FeedForward]) -> DecoderConfig:
    mixers = {FULL: config.attention(qk_norm="head", rope=config.rope(1_000_000.0)), _CONV: _conv(config)}
    return _decoder(config, config.layers(_layer_types(config), mixers, mlps, _NORMS))


def _conv(config: ModelFile) -> ShortConvConfig:
    return ShortConvConfig(
        num_channels=config.positive("hidden_size"),
        conv_taps=config.conv_taps("conv_L_cache"),
        bias=config.get("conv_bias", bool, False),
    )


def _decoder(config: ModelFile, layers: list[LayerConfig]) -> DecoderConfig:
    return config.decoder(layers, norm=NormConfig(eps=config.positive_number("norm_eps", 1e-5)), layout=_LAYOUT)


def _layer_types(config: ModelFile) -> list[str]:
    """Read which layers have attention: from `layer_types`, or in older files from `full_attn_idxs`."""
    types = config.layer_types(supported=(FULL, _CONV))
    if types is None:
        indices = config.values.get("full_attn_idxs")
        if not isinstance(indices, list):
            raise config.error("full_attn_idxs", f"{show(indices)} is not a list of layers")
        types = [FULL if number in indices else _CONV for number in range(config.num_layers())]
    return config.with_full(types)


LFM2 = Family(
    name="LFM2",
    architectures=("Lfm2ForCausalLM",),
    features="gated short convolutions between layers of attention",
    examples=("LiquidAI/LFM2-1.2B",),
    read=read_lfm2,
    ties_embeddings=True,
)
LFM2_VL = Family(
    name="LFM2-VL",
    architectures=("Lfm2VlForConditionalGeneration",),
    features="LFM2 with a vision tower (SigLIP 2), which sees large images as marked tiles",
    examples=("LiquidAI/LFM2-VL-1.6B",),
    read=lambda config: read_by_type(config, {"lfm2": read_lfm2, "lfm2_moe": read_lfm2_moe}, "lfm2"),
    read_vision=read_lfm2_vision,
    ties_embeddings=True,
)
LFM2_MOE = Family(
    name="LFM2 MoE",
    architectures=("Lfm2MoeForCausalLM",),
    features="gated short convolutions between layers of attention; a mixture of experts",
    examples=("LiquidAI/LFM2-8B-A1B",),
    read=read_lfm2_moe,
    ties_embeddings=True,
)
LFM3 = Family(
    name="LFM3",
    architectures=("Lfm3ForCausalLM",),
    features="gated short convolutions between layers of attention, some with windows; gated heads",
    examples=("LiquidAI/LFM3-1.7B",),
    read=read_lfm3,
    ties_embeddings=True,
    defaults={"head_dim": 128, "conv_L_cache": 7, "rope_parameters": _LFM3_ROPES},
)
LFM3_VL = replace(
    LFM3,
    name="LFM3-VL",
    architectures=("Lfm3VlForConditionalGeneration",),
    features="LFM3 with a vision tower, most of whose layers convolve patches",
    examples=("LiquidAI/LFM3-VL-2B",),
    read_vision=read_lfm3_vision,
)
