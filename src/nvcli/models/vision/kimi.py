"""The tower of Kimi K2.5 (MoonViT, https://arxiv.org/abs/2602.02276), as config.json spells it. Torch-free."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import PREFIXES, read_sizes, side_of

_NAMES = TowerNames(
    prefixes=(*PREFIXES, ("mm_projector.", f"{TOWER}.merger.")),
    renamed=(
        ("patch_embed.pos_emb.", "pos_embed."),
        ("encoder.", ""),
        (".norm1.", ".norm2."),
        (".norm0.", ".norm1."),
        (".mlp.fc1.", ".mlp.linear_fc2."),
        (".mlp.fc0.", ".mlp.linear_fc1."),
        (".wqkv.", ".attn.qkv."),
        (".wo.", ".attn.proj."),
        ("final_layernorm.", "last_norm."),
        ("pre_norm.", "norm."),
        ("proj.0.", "linear_fc1."),
        ("proj.2.", "linear_fc2."),
    ),
)
_KEYS = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "projector_ln_eps": "projection_layer_norm_eps",
}
"""Keys of published files."""
_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "hidden_act": "gelu_pytorch_tanh",
}
_EPS = "projection_layer_norm_eps"


def read_kimi_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Kimi K2.5, in published files or those of transformers."""
    vision = vision.with_names(_KEYS).with_defaults(_DEFAULTS)
    vision.only(
        hidden_act="gelu_pytorch_tanh",
        merge_type="sd2_tpool",
        mm_projector_type="patchmerger",
        projector_hidden_act="gelu",
    )
    sizes, merge = read_sizes(vision, text), side_of(vision, "merge_kernel_size", 2)
    hidden, positions = sizes["hidden_size"], vision.positive("pos_emb_height")
    vision.only(pos_emb_width=positions, mm_hidden_size=hidden)
    config.only(projection_hidden_size=hidden)
    return VisionConfig(
        names=_NAMES,
        processor="kimi_k25",
        merge_size=merge,
        merger=MergerConfig(
            kind="squares",
            size=hidden * merge**2,
            eps=(vision if vision.has(_EPS) else config).positive_number(_EPS, 1e-5),
        ),
        eps=1e-5,
        activation="gelu_tanh",
        has_last_norm=True,
        rope="turns",
        has_paired_rows=True,
        num_positions=positions**2,
        has_square_table=True,
        interpolation="bicubic",
        image_token_id=config.with_names({"media_placeholder_token_id": "image_token_id"}).get(
            "image_token_id", int, 163_605
        ),
        **sizes,
    )
