"""OLMo (https://arxiv.org/abs/2402.00838), with LayerNorm without weights; OLMo 2 (https://arxiv.org/abs/2501.00656),
OLMo 3, and OLMoE (https://arxiv.org/abs/2409.02060), with norms over all heads together. OLMo 2 and 3 have norms only
after the blocks; OLMoE has small experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, LINEAR, SLIDING, ModelFile
from nvcli.models.families.qwen_hybrid import read_delta_net
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.rope_config import rope_section

NORMS_AFTER = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
"""Norms of the blocks' outputs alone."""


_OLMO_EPS = 1e-5


def read_olmo(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers, whose queries, keys and values may be clamped (`clip_qkv`)."""
    attention = config.attention(bias=config.bias(), clip=config.optional_number("clip_qkv", None), rope=config.rope())
    norm = NormConfig(eps=_OLMO_EPS, kind="layer", has_weight=False)
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp()), norm=norm)


def read_olmo2(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers."""
    return config.decoder(_layer(config, FULL, 10_000.0))


def read_olmo3(config: ModelFile) -> DecoderConfig:
    """Read windows in three of four layers. Older files give one rotation; if it is stretched, the stretch applies only
    to full attention."""
    kinds = {kind: _layer(config, kind, 500_000.0) for kind in (SLIDING, FULL)}
    return config.decoder(kinds[kind] for kind in config.every_nth_full(4))


def _layer(config: ModelFile, kind: str, default_theta: float) -> LayerConfig:
    theta = config.positive_number("rope_theta", default_theta)
    source = config
    if kind == SLIDING and config.values.get("rope_scaling"):
        source = config.replacing(rope_scaling=None)
    attention = config.attention(
        window=config.window_of(kind, 4096), qk_norm="row", bias=config.bias(), rope=source.rope(theta, layer_type=kind)
    )
    return LayerConfig(mixer=attention, mlp=config.mlp(), norms=NORMS_AFTER)


OLMO = Family(
    name="OLMo",
    architectures=("OlmoForCausalLM",),
    features="LayerNorm without weights",
    examples=("allenai/OLMo-7B-0724-Instruct-hf", "allenai/OLMo-1B-hf"),
    read=read_olmo,
)
OLMO2 = Family(
    name="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    features="norms after the blocks, and over all heads together",
    examples=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0325-32B-Instruct"),
    read=read_olmo2,
)
OLMO3 = Family(
    name="OLMo 3",
    architectures=("Olmo3ForCausalLM",),
    features="as OLMo 2, with windows in three of four layers",
    examples=("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-32B-Think"),
    read=read_olmo3,
)


def read_olmoe(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers."""
    return config.decoder(_layer_with_experts(config, LayerNorms()))


def read_flex_olmo(config: ModelFile) -> DecoderConfig:
    """Read FlexOlmo (https://arxiv.org/abs/2507.07024): OLMo 2 with the experts of OLMoE."""
    return config.decoder(_layer_with_experts(config, NORMS_AFTER, default_theta=500_000.0))


def _layer_with_experts(config: ModelFile, norms: LayerNorms, default_theta: float = 10_000.0) -> LayerConfig:
    routing = config.routing(renormalise=config.get("norm_topk_prob", bool, False))
    clip = config.optional_number("clip_qkv", None)
    return LayerConfig(
        mixer=config.attention(qk_norm="row", bias=config.bias(), clip=clip, rope=config.rope(default_theta)),
        mlp=config.experts(routing, size_key="intermediate_size"),
        norms=norms,
    )


OLMOE = Family(
    name="OLMoE",
    architectures=("OlmoeForCausalLM",),
    features="a mixture of experts; norms over all heads together",
    examples=("allenai/OLMoE-1B-7B-0924-Instruct", "allenai/OLMoE-1B-7B-0125-Instruct"),
    read=read_olmoe,
)
_HYBRID_LAYOUT = CheckpointLayout(
    renamed=(
        (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
        (".linear_attn.q_proj.", ".linear_attn.in_proj_q."),
        (".linear_attn.k_proj.", ".linear_attn.in_proj_k."),
        (".linear_attn.v_proj.", ".linear_attn.in_proj_v."),
        (".linear_attn.g_proj.", ".linear_attn.in_proj_z."),
        (".linear_attn.b_proj.", ".linear_attn.in_proj_b."),
        (".linear_attn.a_proj.", ".linear_attn.in_proj_a."),
        (".linear_attn.o_proj.", ".linear_attn.out_proj."),
        (".linear_attn.o_norm.", ".linear_attn.norm."),
    )
)


def read_olmo_hybrid(config: ModelFile) -> DecoderConfig:
    """Read gated delta nets, with norms before the blocks, between layers of full attention, with norms after them.
    These rotate only if the file gives a theta."""
    attention = config.attention(qk_norm="row", bias=config.bias(), rope=config.rope())
    if not rope_section(config).has("rope_theta"):
        attention = replace(attention, rope=None)
    scale = 2.0 if config.get("linear_allow_neg_eigval", bool, True) else 1.0
    linear = LayerConfig(
        mixer=read_delta_net(config, stored="apart", beta_scale=scale, norm_eps=1e-5), mlp=config.mlp()
    )
    full = replace(linear, mixer=attention, norms=NORMS_AFTER)
    kinds = config.layer_kinds(lambda number: (number + 1) % 4 == 0, other=LINEAR)
    return config.decoder((full if kind == FULL else linear for kind in kinds), layout=_HYBRID_LAYOUT)


FLEX_OLMO = Family(
    name="FlexOlmo",
    architectures=("FlexOlmoForCausalLM",),
    features="as OLMo 2, with a mixture of experts",
    examples=("allenai/FlexOlmo-7x7B-1T",),
    read=read_flex_olmo,
)
OLMO_HYBRID = Family(
    name="Olmo Hybrid",
    architectures=("OlmoHybridForCausalLM",),
    features="gated delta nets between layers of attention without rotary positions",
    examples=("allenai/Olmo-Hybrid-7B",),
    read=read_olmo_hybrid,
)
