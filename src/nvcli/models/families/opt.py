"""OPT (https://arxiv.org/abs/2205.01068): learned positions, LayerNorm and biases everywhere, relu."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms

_FIRST_POSITION = 2
"""The row of the first position's embedding, in all models of the family."""
_LAYOUT = CheckpointLayout(
    starts=starts_after("model.", {"decoder.final_layer_norm.": "model.norm.", "decoder.": "model."}),
    renamed=((".out_proj.", ".o_proj."), (".fc1.", ".mlp.up_proj."), (".fc2.", ".mlp.down_proj.")),
)


def read(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer. OPT-350M, with norms behind the blocks and narrower embeddings, is refused by
    the keys that say so."""
    config.only("do_layer_norm_before", True)
    config.only("word_embed_proj_dim", config.positive("hidden_size"))
    config.only("_remove_final_layer_norm", False)
    config.only("layer_norm_elementwise_affine", True)
    bias = config.get("enable_bias", bool, True)
    layer = LayerConfig(
        mixer=config.attention(rope=lambda _: None, bias=bias),
        mlp=config.plain_mlp("relu", bias=bias),
        norms=LayerNorms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"),
    )
    positions = config.learned_positions(_FIRST_POSITION)
    return config.decoder(layer, norm=config.layer_norm(), layout=_LAYOUT, learned_positions=positions)


OPT = Family(
    name="OPT",
    architectures=("OPTForCausalLM",),
    features="learned positions, LayerNorm and biases everywhere, relu",
    examples=("facebook/opt-6.7b", "facebook/opt-125m"),
    read=read,
    ties_embeddings=True,
    keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
)
