"""Hunyuan V3 (https://github.com/Tencent-Hunyuan): normed queries and keys, and experts chosen by sigmoid scores with a
correction, after a dense layer."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, shared_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig

_V3_NAMES = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
    SHARED_EXPERT,
)


def read_v3(config: ModelFile) -> DecoderConfig:
    """Read which layers have experts. A layer for multi-token prediction stays on disk."""
    bias = config.bias()
    attention = config.attention(default_theta=11_158_840.0, qk_norm="head", qkv_bias=bias, o_bias=bias)
    if config.get("mlp_bias", bool, False):
        raise config.error("mlp_bias", "true is not supported beside experts, only false")
    routing = config.routing(
        scoring="sigmoid",
        renormalise=True,
        scale=config.positive_number("router_scaling_factor", 2.826),
    )
    shared = shared_experts(config.with_values({"num_shared_experts": 1, **config.values}), "num_shared_experts")
    experts = config.experts(routing, has_correction=True, shared=shared)
    dense = config.mlp()
    layers = (LayerConfig(mixer=attention, mlp=experts if is_sparse else dense) for is_sparse in config.sparse_layers())
    layout = CheckpointLayout(renamed=_V3_NAMES, left=(f"model.layers.{config.num_layers()}.",))
    return config.decoder(layers, layout=layout)


HUNYUAN_V3 = Family(
    name="Hunyuan V3",
    architectures=("HYV3ForCausalLM",),
    features="normed queries and keys; a mixture of experts after a dense layer, and an expert that all tokens share",
    examples=("tencent/Hy3-preview",),
    read=read_v3,
)
