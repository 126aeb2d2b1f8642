"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373): attention and MLP side by
side, each behind a norm of its own, and a quarter of each head rotated. Persimmon
(https://www.adept.ai/blog/persimmon-8b) has them one after the other, with squared relu and with LayerNorm of queries
and keys; StableLM 2 (https://arxiv.org/abs/2402.17834) has gated MLPs; Falcon (https://arxiv.org/abs/2311.16867) has
few KV heads or one, and in its smallest models scores that fall with distance (ALiBi)."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.alibi import ALIBI_POSITIONS, with_alibi
from nvcli.models.mixers.attention import AttentionConfig, QKNorm

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


_FALCON_STARTS = {"word_embeddings.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm."}


def read_falcon(config: ModelFile) -> DecoderConfig:
    """Read attention and MLP side by side, or in old models one after the other. The queries of a KV head, its key and
    its value lie together.

    With ALiBi, the slopes are scaled as the scores are. transformers rounds what it adds to bfloat16, so that distant
    keys blur; nvcli does not.
    """
    is_new = config.get("new_decoder_architecture", bool, False)
    bias = config.get("bias", bool, False)
    if not is_new:  # `num_kv_heads` counts in the new architecture alone
        num_kv_heads = 1 if config.get("multi_query", bool, True) else None
        config = config.replacing(num_key_value_heads=num_kv_heads)
    if has_alibi := config.get("alibi", bool, False):
        plain = config.attention(bias=bias, rope=None)
        attention: AttentionConfig = with_alibi(plain, factor=plain.scale)
    else:
        attention = config.attention(bias=bias, rope=config.rope())
    mlp = config.plain_mlp("gelu", bias=bias, default_size=4 * config.positive("hidden_size"))
    layout = CheckpointLayout(
        starts=starts_after("transformer.", _FALCON_STARTS),
        renamed=((".self_attention.", ".self_attn."), *RENAMED),
        qkv_groups=attention.num_kv_heads,
    )
    layer = LayerConfig(mixer=attention, mlp=mlp, norms=_norms(config, is_new=is_new))
    most = ALIBI_POSITIONS if has_alibi else None
    return config.decoder(layer, norm=config.layer_norm(), layout=layout, max_positions=most)


def _norms(config: ModelFile, *, is_new: bool) -> LayerNorms:
    """Read whether MLPs have a norm of their own."""
    is_parallel = config.get("parallel_attn", bool, True)
    if not is_parallel and is_new:
        raise config.error("parallel_attn", "false is not supported together with `new_decoder_architecture`")
    if not is_parallel:
        return LayerNorms()
    num_norms = config.positive("num_ln_in_parallel_attn", 2 if is_new else 1, most=2)
    if num_norms == 1:
        return LayerNorms(before_mlp=None)
    if not is_new:
        raise config.error("num_ln_in_parallel_attn", "2 is not supported without `new_decoder_architecture`")
    return LayerNorms(before_attention="ln_attn", before_mlp="ln_mlp", mlp_skips_mixer=True)


FALCON = Family(
    name="Falcon",
    architectures=("FalconForCausalLM",),
    features="attention and MLP side by side, LayerNorm with biases, few KV heads; ALiBi in old models",
    examples=("tiiuae/falcon-7b-instruct", "tiiuae/falcon-40b", "tiiuae/falcon-11B", "tiiuae/falcon-rw-1b"),
    read=read_falcon,
    ties_embeddings=True,
    keys={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_head_kv": "num_key_value_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={"max_position_embeddings": 2048},
)


def read_stablelm(config: ModelFile) -> DecoderConfig:
    """Read attention and MLP one after the other, or side by side."""
    if config.get("qk_layernorm", bool, False):
        raise config.error("qk_layernorm", "true is not supported: each head would have a norm of its own")
    attention = config.attention(
        qkv_bias=config.get("use_qkv_bias", bool, False), rope=config.rope(default_partial=0.25)
    )
    norms = LayerNorms(before_mlp=None) if config.get("use_parallel_residual", bool, False) else LayerNorms()
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp(), norms=norms), norm=config.layer_norm())


STABLELM = Family(
    name="StableLM 2",
    architectures=("StableLmForCausalLM",),
    features="LayerNorm with biases, a quarter of each head rotated",
    examples=("stabilityai/stablelm-2-1_6b-chat", "stabilityai/stablelm-3b-4e1t"),
    read=read_stablelm,
)
