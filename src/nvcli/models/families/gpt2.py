"""GPT-2 (https://openai.com/index/better-language-models): learned positions, LayerNorm and biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms

KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""GPT-2's names of keys, which later families have taken over."""
_STARTS = {
    "wte.": "model.embed_tokens.",
    "wpe.": "model.embed_positions.",
    "h.": "model.layers.",
    "ln_f.": "model.norm.",
}
_RENAMED = (
    (".attn.", ".self_attn."),
    (".self_attn.c_attn.", ".self_attn.qkv_proj."),
    (".self_attn.c_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)


def read_gpt2(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer; weights of linear layers are stored as [in, out]."""
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    attention = config.attention(rope=lambda _: None, bias=True)
    if not config.get("scale_attn_weights", bool, True):
        attention = replace(attention, scale=1.0)
    mlp = config.plain_mlp("gelu_new", bias=True, default_size=4 * config.positive("hidden_size"))
    layout = CheckpointLayout(
        starts=starts_after("transformer.", _STARTS),
        renamed=_RENAMED,
        transposes_linear=True,
    )
    layer = LayerConfig(mixer=attention, mlp=mlp, norms=LayerNorms(before_attention="ln_1", before_mlp="ln_2"))
    return config.decoder(layer, norm=config.layer_norm(), layout=layout, learned_positions=config.learned_positions())


GPT2 = Family(
    name="GPT-2",
    architectures=("GPT2LMHeadModel",),
    features="learned positions, LayerNorm and biases everywhere",
    examples=("openai-community/gpt2-xl", "distilbert/distilgpt2"),
    read=read_gpt2,
    ties_embeddings=True,
    keys=KEYS,
)
