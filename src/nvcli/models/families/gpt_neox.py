"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373): attention and MLP side by
side, each behind a norm of its own, and a quarter of each head rotated. Persimmon
(https://www.adept.ai/blog/persimmon-8b) has them one after the other, with squared relu and with LayerNorm of queries
and keys."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import QKNorm

_STARTS = {"embed_in.": "model.embed_tokens.", "layers.": "model.layers.", "final_layer_norm.": "model.norm."}
RENAMED = (
    (".query_key_value.", ".qkv_proj."),
    (".dense.", ".o_proj."),
    (".dense_h_to_4h.", ".up_proj."),
    (".dense_4h_to_h.", ".down_proj."),
)
"""Megatron's names of projections."""


def read(config: ModelFile) -> DecoderConfig:
    """Read attention and MLP side by side, or one after the other. Each head's query, key and value lie together."""
    attention = config.attention(bias=config.bias(default=True), rope=config.rope(default_partial=0.25))
    norms = LayerNorms(mlp_skips_mixer=config.get("use_parallel_residual", bool, True))
    layout = CheckpointLayout(
        starts=(*starts_after("gpt_neox.", _STARTS), ("embed_out.", "lm_head.")),
        renamed=((".attention.", ".self_attn."), *RENAMED),
        qkv_groups=attention.num_kv_heads,
    )
    layer = LayerConfig(mixer=attention, mlp=config.plain_mlp("gelu", bias=True), norms=norms)
    return config.decoder(layer, norm=config.layer_norm(), layout=layout)


GPT_NEOX = Family(
    name="GPT-NeoX, Pythia",
    architectures=("GPTNeoXForCausalLM",),
    features="attention and MLP side by side, LayerNorm with biases, a quarter of each head rotated",
    examples=("EleutherAI/pythia-12b", "EleutherAI/gpt-neox-20b", "databricks/dolly-v2-12b"),
    read=read,
    keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
)


def read_persimmon(config: ModelFile) -> DecoderConfig:
    """Read Persimmon."""
    qk_norm: QKNorm | None = "layer" if config.get("qk_layernorm", bool, True) else None
    attention = config.attention(bias=True, qk_norm=qk_norm, rope=config.rope(25_000.0, default_partial=0.5))
    layout = CheckpointLayout(
        starts=(("model.final_layernorm.", "model.norm."),),
        renamed=(*RENAMED, (".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm.")),
        qkv_groups=attention.num_kv_heads,
    )
    layer = LayerConfig(mixer=attention, mlp=config.plain_mlp("relu2", bias=True))
    return config.decoder(layer, norm=config.layer_norm(), layout=layout)


PERSIMMON = Family(
    name="Persimmon",
    architectures=("PersimmonForCausalLM",),
    features="LayerNorm with biases, also of queries and keys; half of each head rotated, squared relu",
    examples=("adept/persimmon-8b-chat",),
    read=read_persimmon,
)
