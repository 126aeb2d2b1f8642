"""OPT (https://arxiv.org/abs/2205.01068), and two models of its layers with gelu and scaled embeddings: BioGPT
(https://arxiv.org/abs/2210.10341) and XGLM (https://arxiv.org/abs/2112.10668), whose positions are sines and
cosines."""

from __future__ import annotations

import math
from typing import Any

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mixer import NormConfig

_FIRST_POSITION = 2
"""The row of the first position's embedding, in all these models."""
_EPS = 1e-5
_RENAMED = ((".out_proj.", ".o_proj."), (".fc1.", ".mlp.up_proj."), (".fc2.", ".mlp.down_proj."))
_LAYOUT = CheckpointLayout(
    starts=starts_after("model.", {"decoder.final_layer_norm.": "model.norm.", "decoder.": "model."}),
    renamed=_RENAMED,
)
_LAYOUT_BIOGPT = CheckpointLayout(
    starts=(
        *starts_after("biogpt.", {"layer_norm.": "model.norm.", "layers.": "model.layers.", "embed_": "model.embed_"}),
        ("output_projection.", "lm_head."),
    ),
    renamed=_RENAMED,
)
_LAYOUT_XGLM = CheckpointLayout(
    starts=starts_after("model.", {"layer_norm.": "model.norm."}), renamed=_RENAMED, left=("model.embed_positions.",)
)


def read(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer. OPT-350M, with norms behind the blocks and narrower embeddings, is refused by
    the keys that say so."""
    config.only(do_layer_norm_before=True, word_embed_proj_dim=config.positive("hidden_size"))
    config.only(_remove_final_layer_norm=False, layer_norm_elementwise_affine=True)
    layer = _layer(config, "relu", bias=config.get("enable_bias", bool, True))
    positions = config.learned_positions(_FIRST_POSITION)
    return config.decoder(layer, norm=config.layer_norm(), layout=_LAYOUT, learned_positions=positions)


def read_biogpt(config: ModelFile) -> DecoderConfig:
    """Read BioGPT, whose norms ignore the epsilon of its files."""
    positions = config.learned_positions(_FIRST_POSITION)
    return _with_scale(config, layout=_LAYOUT_BIOGPT, learned_positions=positions)


def read_xglm(config: ModelFile) -> DecoderConfig:
    """Read XGLM. Older files hold the table of positions, which is computed."""
    config.only(add_cross_attention=False)
    return _with_scale(config, layout=_LAYOUT_XGLM, first_sinusoid=_FIRST_POSITION)


def _with_scale(config: ModelFile, **settings: Any) -> DecoderConfig:
    """Read layers with gelu, and embeddings that are scaled by the root of their size."""
    scale = math.sqrt(config.positive("hidden_size")) if config.get("scale_embedding", bool, True) else 1.0
    norm = NormConfig(eps=_EPS, kind="layer", has_bias=True)
    return config.decoder(_layer(config, "gelu", bias=True), norm=norm, embedding_scale=scale, **settings)


def _layer(config: ModelFile, activation: str, *, bias: bool) -> LayerConfig:
    return LayerConfig(
        mixer=config.attention(bias=bias, rope=None),
        mlp=config.plain_mlp(activation, bias=bias),
        norms=LayerNorms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"),
    )


OPT = Family(
    name="OPT",
    architectures=("OPTForCausalLM",),
    features="learned positions, LayerNorm and biases everywhere, relu",
    examples=("facebook/opt-6.7b", "facebook/opt-125m"),
    read=read,
    ties_embeddings=True,
    keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
)
BIOGPT = Family(
    name="BioGPT",
    architectures=("BioGptForCausalLM",),
    features="as OPT, with gelu and scaled embeddings",
    examples=("microsoft/biogpt", "microsoft/BioGPT-Large"),
    read=read_biogpt,
    ties_embeddings=True,
)
XGLM = Family(
    name="XGLM",
    architectures=("XGLMForCausalLM",),
    features="as BioGPT, with sinusoidal positions",
    examples=("facebook/xglm-7.5B", "facebook/xglm-564M"),
    read=read_xglm,
    ties_embeddings=True,
    keys={
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    },
)
