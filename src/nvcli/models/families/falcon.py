"""Falcon (https://arxiv.org/abs/2311.16867): attention and MLP side by side, with few KV heads or one."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.gpt_neox import RENAMED
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms

_STARTS = {"word_embeddings.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm."}


def read(config: ModelFile) -> DecoderConfig:
    """Read attention and MLP side by side, or in old models one after the other. The queries of a KV head, its key and
    its value lie together."""
    config.only(alibi=False)
    is_new = config.get("new_decoder_architecture", bool, False)
    bias = config.get("bias", bool, False)
    if not is_new:  # `num_kv_heads` counts in the new architecture alone
        num_kv_heads = 1 if config.get("multi_query", bool, True) else None
        config = config.replacing(num_key_value_heads=num_kv_heads)
    attention = config.attention(bias=bias, rope=config.rope())
    mlp = config.plain_mlp("gelu", bias=bias, default_size=4 * config.positive("hidden_size"))
    layout = CheckpointLayout(
        starts=starts_after("transformer.", _STARTS),
        renamed=((".self_attention.", ".self_attn."), *RENAMED),
        qkv_groups=attention.num_kv_heads,
    )
    layer = LayerConfig(mixer=attention, mlp=mlp, norms=_norms(config, is_new=is_new))
    return config.decoder(layer, norm=config.layer_norm(), layout=layout)


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
    features="attention and MLP side by side, LayerNorm with biases, few KV heads",
    examples=("tiiuae/falcon-7b-instruct", "tiiuae/falcon-40b", "tiiuae/falcon-11B"),
    read=read,
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
