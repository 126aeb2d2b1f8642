"""Mixtures of experts with windows in most layers. Mellum 2 (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base)
has kinds of layers that rotate differently; in Flint (https://huggingface.co/RecursiveSI/flint) and Kolibri 1
(https://huggingface.co/Aleph-Alpha/Kolibri-1) full attention does not rotate. AFMoE (Arcee's Trinity,
https://huggingface.co/arcee-ai/Trinity-Mini), Laguna (https://huggingface.co/poolside) and Beam
(https://huggingface.co/reflection/Beam-1.0-501B-A23B) gate the result of attention. MiMo-V2-Flash
(https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash) has attention sinks, and values that are smaller than their keys.

In Beam the n-th block's result is added as h_n = b_n / √n + h_(n-1) × √((n - 1) / n), where n begins with 2. So the
stream is kept times √n, and blocks add their outputs as they are; the epsilons of the norms that read it are multiplied
by n.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, first_layers_dense, read_experts, shared_experts
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import NORMS_ON_BOTH_SIDES
from nvcli.models.families.glm import NORMS_OF_GLM4
from nvcli.models.families.model_file import FULL, MAX_HEAD_DIM, SLIDING, ModelFile
from nvcli.models.families.qwen import layers_without_experts
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig, OutputGate, QueryScaling
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mtp_config import NORM, MTPConfig, names_of_layer

_FLINT_LAYOUT = CheckpointLayout(renamed=((".self_attn.softmax_offset", ".self_attn.sinks"),))
_KOLIBRI_LAYOUT = CheckpointLayout(
    renamed=(
        (".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".post_attn_norm.", ".post_self_attn_layernorm."),
        (".post_ffn_norm.", ".post_mlp_layernorm."),
        SHARED_EXPERT,
    )
)


def read_mellum(config: ModelFile) -> DecoderConfig:
    """Read rotations by kind of layer; by default all layers have full attention and experts. A head for multi-token
    prediction stays on disk."""
    attention = {
        kind: config.attention(
            window=config.window_of(kind, 1024),
            qk_norm="head",
            bias=config.bias(),
            rope=config.rope(default_theta=None, layer_type=kind),
        )
        for kind in (FULL, SLIDING)
    }
    experts = config.experts(config.routing(renormalise=config.get("norm_topk_prob", bool, True)))
    kinds = config.layer_kinds(lambda _: True)
    mlps = [experts if sparse else config.mlp() for sparse in config.sparse_layers(default=0)]
    return config.decoder(config.layers(kinds, attention, mlps), layout=CheckpointLayout(left=("mtp.",)))


def read_flint(config: ModelFile) -> DecoderConfig:
    """Read attention sinks in all layers. By default the first two layers have no experts; those two, every fourth
    layer after them and the last one have full attention."""
    last = config.num_layers() - 1
    attention = _attention(config, bias=config.bias(), has_sinks=True)
    routing = config.routing(scoring="sigmoid", renormalise=config.get("norm_topk_prob", bool, True))
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(routing, has_wide_router=True, shared=shared)
    kinds = config.layer_kinds(lambda number: number < 2 or number % 4 == 1 or number == last)
    is_dense = layers_without_experts(config, default=(0, 1))
    mlps = [config.mlp() if dense else experts for dense in is_dense]
    return config.decoder(config.layers(kinds, attention, mlps), layout=_FLINT_LAYOUT)


def read_kolibri(config: ModelFile) -> DecoderConfig:
    """Read norms before and after the blocks, and experts in all layers; every fifth layer has full attention,
    which rotates in models without windows."""
    attention = _attention(config)
    if config.window(513) is None:
        attention[FULL] = attention[SLIDING]
    routing = config.routing(
        scoring="sigmoid", corrects_logits=True, renormalise=config.get("norm_topk_prob", bool, False)
    )
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(routing, has_correction=True, shared=shared)
    layers = config.layers(config.every_nth_full(5), attention, experts, NORMS_OF_GLM4)
    return config.decoder(layers, layout=_KOLIBRI_LAYOUT)


def _attention(config: ModelFile, **traits: Any) -> dict[str, AttentionConfig]:
    """Read attention by kind of layer."""
    return config.by_kind(config.attention(qk_norm="head", rope=config.rope(), **traits), 513, full_rotates=False)


MELLUM = Family(
    name="Mellum 2",
    architectures=("MellumForCausalLM",),
    features="normed queries and keys; rotations by kind of layer; a mixture of experts",
    examples=("JetBrains/Mellum2-12B-A2.5B-Base",),
    read=read_mellum,
    defaults={
        "head_dim": 128,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
)
FLINT = Family(
    name="Flint",
    architectures=("FlintForCausalLM",),
    features="attention sinks; full attention without rotary positions; a mixture of experts",
    examples=("RecursiveSI/flint",),
    read=read_flint,
    defaults={"head_dim": 128},
)
KOLIBRI = Family(
    name="Kolibri 1",
    architectures=("Kolibri1ForCausalLM",),
    features="full attention without rotary positions in every fifth layer; norms on both sides; a mixture of experts",
    examples=("Aleph-Alpha/Kolibri-1",),
    read=read_kolibri,
    defaults={"head_dim": 128},
)


_AFMOE_LAYOUT = CheckpointLayout(
    renamed=(
        (".mlp.router.gate", ".mlp.gate"),
        (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".self_attn.gate_proj", ".self_attn.g_proj"),
        SHARED_EXPERT,
    )
)
_AFMOE_NORMS = LayerNorms(
    after_attention="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
)
_LAGUNA_LAYOUT = CheckpointLayout(
    renamed=((".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"), SHARED_EXPERT)
)
_LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


def read_afmoe(config: ModelFile) -> DecoderConfig:
    """Read windows; layers of full attention do not rotate. The first `num_dense_layers` layers have no experts."""
    full = config.attention(qk_norm="head", bias=config.bias(), gate=OutputGate(), rope=config.rope())
    attention = config.by_kind(full, 1024, full_rotates=False)
    shared = shared_experts(config.with_defaults({"num_shared_experts": 2}), "num_shared_experts")
    experts = config.experts(config.sigmoid_routing("route_scale"), has_correction=True, shared=shared)
    mlps = first_layers_dense(config, experts, "num_dense_layers", 1)
    kinds = config.every_nth_full(4, "global_attn_every_n_layers")
    layers = config.layers(kinds, attention, mlps, _AFMOE_NORMS)
    scale = config.positive("hidden_size") ** 0.5 if config.get("mup_enabled", bool, False) else 1.0
    return config.decoder(layers, layout=_AFMOE_LAYOUT, embedding_scale=scale)


def read_laguna(config: ModelFile) -> DecoderConfig:
    """Read layers whose numbers of heads may differ. Softplus makes the gates, one for each head or for each number."""
    heads = config.of_layers("num_attention_heads_per_layer")
    heads = heads or [config.positive("num_attention_heads")] * config.num_layers()
    config.only(moe_apply_router_weight_on_input=0, moe_router_logit_softcapping=0)
    experts = config.experts(
        config.sigmoid_routing("moe_routed_scaling_factor"),
        has_correction=True,
        shared=config.mlp(size_key="shared_expert_intermediate_size"),
    )
    kinds, mlps = config.layer_kinds(lambda _: True), config.mlps(experts, config.sparse_layers())
    layers = (
        LayerConfig(mixer=_laguna_attention(config, kind, number), mlp=mlp)
        for kind, number, mlp in zip(kinds, heads, mlps, strict=True)
    )
    return config.decoder(layers, layout=_LAGUNA_LAYOUT)


def _laguna_attention(config: ModelFile, kind: str, num_heads: object) -> AttentionConfig:
    gating = config.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise config.error("gating", f"{show(gating)} is not supported; supported: true, per-head, per-element")
    of_layer = config.replacing(num_attention_heads=num_heads)
    return of_layer.attention(
        window=config.window_of(kind, 512),
        qk_norm="head",
        bias=config.bias(),
        gate=OutputGate(function="softplus", is_of_heads=gating != "per-element"),
        rope=of_layer.rope(default_theta=None, layer_type=kind),
    )


AFMOE = Family(
    name="AFMoE (Trinity)",
    architectures=("AfmoeForCausalLM",),
    features="gated attention, full without rotary positions in every fourth layer; a mixture of experts",
    examples=("arcee-ai/Trinity-Mini", "arcee-ai/Trinity-Nano-Preview"),
    read=read_afmoe,
)
LAGUNA = Family(
    name="Laguna",
    architectures=("LagunaForCausalLM",),
    features="gated attention, numbers of heads by layer; a mixture of experts",
    examples=("poolside/laguna-XS.2",),
    read=read_laguna,
    defaults={"head_dim": 128, "rope_parameters": _LAGUNA_ROPES},
)


_LAYOUT = CheckpointLayout(renamed=((".self_attn.gate_proj", ".self_attn.g_proj"),))


def read_beam(config: ModelFile) -> DecoderConfig:
    """Read kinds of layers; by default the last one has full attention too, and the first three have no experts."""
    attention = {kind: _beam_attention(config, kind) for kind in (FULL, SLIDING)}
    experts = read_experts(config)
    last = config.num_layers() - 1
    kinds = config.layer_kinds(lambda number: (number + 1) % 6 == 0 or number == last)
    mlps = config.mlps(experts, config.sparse_layers(default=3))
    eps = config.positive_number("rms_norm_eps", 1e-6)
    layers = (
        LayerConfig(
            mixer=attention[kind],
            mlp=mlp,
            norms=replace(NORMS_ON_BOTH_SIDES, epsilons=(eps * (2 * number + 1), eps, eps * (2 * number + 2), eps)),
        )
        for number, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True))
    )
    return config.decoder(
        layers,
        norm=NormConfig(eps=eps),
        last_norm=NormConfig(eps=eps * (2 * last + 3)),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        layout=_LAYOUT,
    )


def _beam_attention(config: ModelFile, kind: str) -> AttentionConfig:
    """Read one kind of attention: it rotates, or its queries grow with their position."""
    window = config.window_of(kind, 512)
    attention = config.attention(
        window=window,
        qk_norm="head",
        bias=config.bias(),
        gate=OutputGate(has_bias=True),
        rope=config.rope(layer_type=kind),
    )
    ropes = config.object("rope_parameters")
    if ropes.has(kind) or (kind == SLIDING and not ropes.values):
        return attention
    return replace(attention, rope=None, query_scaling=QueryScaling(beta=0.1, length=2048, offset=1, kind="power"))


BEAM = Family(
    name="Beam",
    architectures=("BeamForCausalLM",),
    features="gated attention, full without rotary positions in every sixth layer; a mixture of experts",
    examples=("reflection/Beam-1.0-501B-A23B",),
    read=read_beam,
    defaults={"head_dim": 128, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)


_OF_WINDOWS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "rope_theta"),
    "add_attention_sink_bias",
)
"""Keys that layers with windows may have values of their own for, under names that begin with `swa_`."""
_PREDICTIONS = "model.mtp."
_HEAD = f"{_PREDICTIONS}layers.0."
_SINKS = (".self_attn.attention_sink_bias", ".self_attn.sinks")


def read_mimo(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers. The first of the layers for multi-token prediction, if there
    are any, makes a head; the others stay on disk."""
    config.only(scoring_func="sigmoid", topk_method="noaux_tc")
    attention = {FULL: _mimo_attention(config, FULL), SLIDING: _mimo_attention(_section_of_windows(config), SLIDING)}
    has_window = config.of_layers("hybrid_layer_pattern", (0, 1))
    kinds = config.layer_kinds(
        lambda number: number == 0 or number % 6 == 5 if has_window is None else not has_window[number]
    )
    is_sparse = config.of_layers("moe_layer_freq", (0, 1)) or config.sparse_layers()
    layers = config.layers(kinds, attention, config.mlps(read_experts(config), is_sparse))
    norms = LayerNorms(before_mlp="pre_mlp_layernorm")
    layer = LayerConfig(mixer=attention[SLIDING], mlp=config.mlp(), norms=norms)
    names = (*names_of_layer(layer, _HEAD), (f"{_HEAD}final_layernorm.", f"{NORM}."))
    head = MTPConfig(layer=layer, norm=config.rms_norm(), stored_names=names)
    has_head = config.get("num_nextn_predict_layers", int, 1) > 0
    layout = CheckpointLayout(renamed=(_SINKS,), left=(_PREDICTIONS,))
    return config.decoder(layers, layout=layout, mtp=head if has_head else None)


def _mimo_attention(config: ModelFile, kind: str) -> AttentionConfig:
    head_dim = config.head_dim()
    value_dim = config.positive("v_head_dim", 128, most=MAX_HEAD_DIM)
    if value_dim > head_dim:
        raise config.error("v_head_dim", f"{value_dim} is more than `head_dim`, {head_dim}")
    previous = config.positive("sliding_window_size") if config.has("sliding_window_size") else None
    window = config.window(129) if previous is None else previous + 1
    return config.attention(
        qkv_bias=config.bias(),
        o_bias=False,
        value_dim=None if value_dim == head_dim else value_dim,
        value_factor=config.positive_number("attention_value_scale", 1.0),
        window=config.bounded(window) if kind == SLIDING else None,
        has_sinks=config.get("add_attention_sink_bias", bool, kind == SLIDING),
        rope=config.rope(None, layer_type=kind, default_partial=0.334),
    )


def _section_of_windows(config: ModelFile) -> ModelFile:
    own = config.with_defaults({"swa_num_key_value_heads": 2 * config.num_kv_heads()})
    return own.with_names({f"swa_{key}": key for key in _OF_WINDOWS})


MIMO_V2_FLASH = Family(
    name="MiMo-V2-Flash",
    architectures=("MiMoV2FlashForCausalLM",),
    features="attention sinks and windows in most layers; values smaller than keys; a mixture of experts",
    examples=("XiaomiMiMo/MiMo-V2-Flash",),
    read=read_mimo,
    keys={"layernorm_epsilon": "rms_norm_eps"},
    defaults={
        "head_dim": 192,
        "swa_rope_theta": 10_000.0,
        "rope_theta": 5_000_000.0,
        "attention_value_scale": 0.707,
    },
)
