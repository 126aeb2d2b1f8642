"""The tower of GOT-OCR 2 (SAM, https://arxiv.org/abs/2304.02643), as config.json spells it. Torch-free.

Its scores depend on learned distances, in most layers within windows. Three convolutions and a projection make a token
of 16 patches.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import image_token, layer_list, read_sizes, read_tiles

_NAMES = TowerNames(
    prefixes=(
        ("vision_tower.neck.", f"{TOWER}.merger."),
        ("vision_tower.", f"{TOWER}."),
        ("multi_modal_projector.", f"{TOWER}.merger."),
    ),
    renamed=(
        ("patch_embed.projection.", "patch_embed.proj."),
        ("pos_embed", "pos_embed.weight"),
        (".layer_norm1.", ".norm1."),
        (".layer_norm2.", ".norm2."),
        ("layers.", "blocks."),
        (".attn.rel_pos_h", ".attn.row_distances.weight"),
        (".attn.rel_pos_w", ".attn.distances.weight"),
        (".mlp.lin", ".mlp.linear_fc"),
        ("conv1.", "neck1."),
        ("conv2.", "neck2."),
        ("layer_norm", "neck_norm"),
        ("conv_upsampler", "downsampler"),
        ("multimodal_projector.", "projection."),
    ),
)
_MERGE = 4


def read_got_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GOT-OCR 2."""
    vision.only(hidden_act="gelu", use_abs_pos=True, use_rel_pos=True)
    hidden = vision.positive("hidden_size", 768)
    vision = vision.with_defaults(
        {
            "hidden_size": hidden,
            "intermediate_size": vision.positive("mlp_dim", 4 * hidden),
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "patch_size": 16,
        }
    )
    sizes = read_sizes(vision, text)
    return VisionConfig(
        names=_NAMES,
        processor="got_ocr",
        merger=MergerConfig(
            kind="convolved",
            size=sizes["out_size"],
            neck_size=vision.positive("output_channels", 256),
        ),
        eps=vision.positive_number("layer_norm_eps", 1e-6),
        activation="gelu",
        qkv_bias=vision.get("qkv_bias", bool, True),
        distance_window=vision.positive("window_size", 14),
        full_layers=layer_list(vision, "global_attn_indexes", (2, 5, 8, 11), depth="num_hidden_layers"),
        has_square_table=True,
        interpolation="borders",
        image_token_id=image_token(config, 151_859),
        **read_tiles(vision, sizes["patch_size"], _MERGE, default=1024),
        **sizes,
    )
