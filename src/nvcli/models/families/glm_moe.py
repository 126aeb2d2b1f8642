"""GLM-4.5 and its successors (https://arxiv.org/abs/2508.06471): experts behind some dense layers, chosen by sigmoid
scores with a correction, and one that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.reading import num_layers, read_attention, read_decoder, read_mlp
from nvcli.models.families.reading_experts import read_experts, read_groups, read_routing
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.rope_config import read_rope


def read(config: JsonFile) -> DecoderConfig:
    """Read half-rotated heads. The layers that predict tokens further ahead stay on disk."""
    attention = read_attention(
        config,
        default_theta=None,
        rope=lambda head_dim: read_rope(config, head_dim=head_dim, default_theta=10_000.0, default_partial=0.5),
        qk_norm="head" if config.get("use_qk_norm", bool, False) else None,
        qkv_bias=config.get("attention_bias", bool, False),
    )
    routing = read_routing(
        config,
        keys=("n_routed_experts", "num_local_experts"),
        scoring="sigmoid",
        renormalise=config.get("norm_topk_prob", bool, True),
        scale=config.positive_number("routed_scaling_factor", 1.0),
    )
    dense = read_mlp(config)
    size = config.positive("moe_intermediate_size") * config.positive("n_shared_experts")
    experts = read_experts(
        config,
        read_groups(config, routing),
        has_correction=True,
        shared=replace(dense, intermediate_size=size),
    )
    first = config.get("first_k_dense_replace", int, 0)
    layers = num_layers(config)
    decoder = read_decoder(
        config,
        (LayerConfig(mixer=attention, mlp=dense if number < first else experts) for number in range(layers)),
    )
    left = tuple(f"model.layers.{layers + i}." for i in range(min(config.get("num_nextn_predict_layers", int, 0), 8)))
    return replace(decoder, layout=CheckpointLayout(renamed=((".shared_experts.", ".shared_expert."),), left=left))


GLM4_MOE = Family(
    name="GLM-4.5, 4.6",
    architectures=("Glm4MoeForCausalLM",),
    features="a mixture of experts behind dense layers, and an expert that all tokens share; half of each head rotated",
    examples=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
    read=read,
)
