"""The tower of Step 3.7 (Perception Encoder, https://arxiv.org/abs/2504.13181), as config.json spells it. Torch-free.

Two convolutions that halve the grid of patches make one token of 16. Images are read whole, and long or large ones also
by marked tiles.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_sizes, rope_theta, side_of

_NAMES = TowerNames(
    prefixes=(
        ("vision_model.vit_", f"{TOWER}.merger."),
        ("vision_model.", f"{TOWER}."),
        ("vit_large_projector.", f"{TOWER}.merger.projection."),
    ),
    renamed=(
        ("conv1.", "patch_embed.proj."),
        ("positional_embedding", "pos_embed.weight"),
        ("ln_pre.", "first_norm."),
        ("transformer.resblocks.", "blocks."),
        (".ln_1.", ".norm1."),
        (".ln_2.", ".norm2."),
        (".ls_1.gamma", ".scale1.weight"),
        (".ls_2.gamma", ".scale2.weight"),
        (".attn.in_proj_", ".attn.qkv."),
        (".attn.out_proj.", ".attn.proj."),
        (".mlp.c_fc.", ".mlp.linear_fc1."),
        (".mlp.c_proj.", ".mlp.linear_fc2."),
    ),
)
_TILES = ImageText(  # `replace_image_token` of transformers' processor
    written="<im_patch>",
    token="<im_patch>",
    tile="<patch_start>",
    tile_end="<patch_end>",
    row_end="<patch_newline>",
    whole="<im_start>",
    alone="<im_start>",
    after="<im_end>",
)
_KEYS = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Keys of published files."""
_DEFAULTS = {"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16}
_STRIDE = 2


def read_step_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Step 3.7, in published files or those of transformers."""
    config.only(understand_projector_stride=_STRIDE)
    vision = vision.with_names(_KEYS).with_defaults(_DEFAULTS)
    vision.only(hidden_act="quick_gelu", use_cls_token=False, use_ln_post=False, use_abs_posemb=True, use_rope2d=True)
    inner = int(vision.positive("hidden_size") * vision.positive_number("mlp_ratio", 8960 / 1536))
    sizes = read_sizes(vision.replacing(intermediate_size=inner), text)
    return VisionConfig(
        names=_NAMES,
        processor="step3p7",
        merge_size=_STRIDE**2,
        merger=MergerConfig(kind="convolved", size=0, has_bias=config.get("projector_bias", bool, False)),
        eps=vision.positive_number("layer_norm_eps", 1e-5),
        activation="quick_gelu",
        has_patch_bias=False,
        has_layer_scales=True,
        has_first_norm=True,
        norms_positions=True,
        rope="columns",
        has_paired_rows=True,
        rope_theta=rope_theta(vision),
        num_positions=(side_of(vision, "image_size", 728) // sizes["patch_size"]) ** 2,
        interpolation="borders",
        image_token_id=config.get("image_token_id", int, 151_679),
        text=_TILES,
        **sizes,
    )
