"""AFMoE (Arcee's Trinity, https://huggingface.co/arcee-ai/Trinity-Mini) and Laguna
(https://huggingface.co/poolside): attention whose result is gated, and experts chosen by sigmoid scores with a
correction."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, first_layers_dense, shared_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig, OutputGate

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
    routing = config.routing(scoring="sigmoid", renormalise=True, scale=config.positive_number("route_scale", 1.0))
    shared = shared_experts(config.with_defaults({"num_shared_experts": 2}), "num_shared_experts")
    experts = config.experts(routing, has_correction=True, shared=shared)
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
        config.routing(
            scoring="sigmoid", renormalise=True, scale=config.positive_number("moe_routed_scaling_factor", 1.0)
        ),
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
