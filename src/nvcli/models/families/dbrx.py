"""DBRX (https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm): a mixture of experts, with clamped
queries, keys and values and with LayerNorm without biases."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import NormConfig

_LAYOUT = CheckpointLayout(
    starts=starts_after(
        "transformer.", {"wte.": "model.embed_tokens.", "blocks.": "model.layers.", "norm_f.": "model.norm."}
    ),
    renamed=(
        (".norm_attn_norm.attn.Wqkv.", ".self_attn.qkv_proj."),
        (".norm_attn_norm.attn.out_proj.", ".self_attn.o_proj."),
        (".norm_attn_norm.norm_1.", ".input_layernorm."),
        (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
        (".ffn.router.layer.", ".mlp.gate."),
        (".ffn.experts.mlp.w1", ".mlp.experts.gate_proj"),
        (".ffn.experts.mlp.v1", ".mlp.experts.up_proj"),
        (".ffn.experts.mlp.w2", ".mlp.experts.down_proj"),
    ),
    flattens_experts=True,
)
_FFN_KEYS = {
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "ffn_hidden_size": "intermediate_size",
}


def read(config: ModelFile) -> DecoderConfig:
    """Read attention and experts, each from a section of its own."""
    of_attention, ffn = config.object("attn_config"), config.object("ffn_config").with_names(_FFN_KEYS)
    given = {"num_key_value_heads": of_attention.positive("kv_n_heads", 1)}
    if of_attention.has("rope_theta"):
        given["rope_theta"] = of_attention.values["rope_theta"]
    config = config.replacing(**given)
    attention = config.attention(clip=of_attention.optional_number("clip_qkv", None), rope=config.rope())
    ffn.object("ffn_act_fn").only(name="silu")
    ffn.only(moe_normalize_expert_weights=1)
    renormalises = ffn.values.get("moe_normalize_expert_weights", 1) is not None
    experts = ffn.experts(ffn.routing(renormalise=renormalises), size_key="intermediate_size")
    layer = LayerConfig(mixer=attention, mlp=experts)
    return config.decoder(layer, norm=NormConfig(eps=1e-5, kind="layer"), layout=_LAYOUT)


DBRX = Family(
    name="DBRX",
    architectures=("DbrxForCausalLM",),
    features="a mixture of experts; clamped queries, keys and values",
    examples=("databricks/dbrx-instruct",),
    read=read,
    keys={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
)
