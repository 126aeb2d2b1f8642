"""Families whose scores fall with the distance of tokens (ALiBi): BLOOM (https://arxiv.org/abs/2211.05100), with biases
and normed embeddings, and MPT (https://huggingface.co/mosaicml/mpt-7b), without."""

from __future__ import annotations

from typing import Any

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.gpt_neox import RENAMED
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.alibi import ALIBI_POSITIONS, with_alibi
from nvcli.models.mixers.mixer import NormConfig

_BLOOM_STARTS = {
    "word_embeddings_layernorm.": "model.embedding_norm.",
    "word_embeddings.": "model.embed_tokens.",
    "h.": "model.layers.",
    "ln_f.": "model.norm.",
}
_MPT_STARTS = {"wte.": "model.embed_tokens.", "blocks.": "model.layers.", "norm_f.": "model.norm."}
_MPT_NAMES = (
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".ffn.", ".mlp."),
)


def read_bloom(config: ModelFile) -> DecoderConfig:
    """Read LayerNorm and biases everywhere. Each head's query, key and value lie together."""
    config.only(apply_residual_connection_post_layernorm=False)
    attention = with_alibi(config.attention(rope=None, bias=True))
    mlp = _sized(config, 4).plain_mlp("gelu_pytorch_tanh", bias=True)
    norm = config.layer_norm("layer_norm_epsilon")
    layout = CheckpointLayout(
        starts=starts_after("transformer.", _BLOOM_STARTS),
        renamed=((".self_attention.", ".self_attn."), *RENAMED),
        qkv_groups=attention.num_heads,
    )
    return _decoder(config, LayerConfig(mixer=attention, mlp=mlp), norm=norm, embedding_norm=norm, layout=layout)


def read_mpt(config: ModelFile) -> DecoderConfig:
    """Read LayerNorm without biases, and no biases anywhere."""
    config.only(no_bias=True)
    own = config.object("attn_config")
    own.only(alibi=True, attn_type="multihead_attention", prefix_lm=False, qk_ln=False)
    plain = config.attention(
        rope=None,
        clip=own.optional_number("clip_qkv", None),
        scale=own.optional_number("softmax_scale", None) or config.head_dim() ** -0.5,
    )
    attention = with_alibi(plain, most=float(own.positive("alibi_bias_max", 8)))
    layer = LayerConfig(
        mixer=attention,
        mlp=_sized(config, config.positive("expansion_ratio", 4)).plain_mlp("gelu"),
        norms=LayerNorms(before_attention="norm_1", before_mlp="norm_2"),
    )
    norm = NormConfig(eps=config.positive_number("layer_norm_epsilon", 1e-5), kind="layer")
    layout = CheckpointLayout(starts=starts_after("transformer.", _MPT_STARTS), renamed=_MPT_NAMES)
    return _decoder(config, layer, norm=norm, layout=layout)


def _sized(config: ModelFile, ratio: int) -> ModelFile:
    """Return the file with the size of its MLPs, whose activation it does not name."""
    return config.replacing(intermediate_size=ratio * config.positive("hidden_size"), hidden_act=None)


def _decoder(config: ModelFile, layer: LayerConfig, **settings: Any) -> DecoderConfig:
    return config.decoder(layer, max_positions=ALIBI_POSITIONS, **settings)


BLOOM = Family(
    name="BLOOM",
    architectures=("BloomForCausalLM",),
    features="scores that fall with distance (ALiBi), LayerNorm with biases, normed embeddings",
    examples=("bigscience/bloomz-7b1", "bigscience/bloom"),
    read=read_bloom,
    ties_embeddings=True,
    keys={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
    },
    defaults={"max_position_embeddings": 2048},
)
MPT = Family(
    name="MPT",
    architectures=("MPTForCausalLM", "MptForCausalLM"),
    features="scores that fall with distance (ALiBi), LayerNorm without biases",
    examples=("mosaicml/mpt-7b-instruct", "mosaicml/mpt-7b-8k-chat"),
    read=read_mpt,
    ties_embeddings=True,
    keys={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
)
