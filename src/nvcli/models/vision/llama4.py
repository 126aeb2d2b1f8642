"""The tower of Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence), as config.json spells it.
Torch-free.

Images are cut into marked tiles, each of which the tower sees by itself, with a token that is not turned.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import image_token, read_sizes, read_tiles, rope_theta

_NAMES = TowerNames(
    prefixes=(("vision_model.", f"{TOWER}."), ("multi_modal_projector.linear_1.", f"{TOWER}.merger.projector.")),
    renamed=(
        ("patch_embedding.linear.", "patch_embed.proj."),
        ("class_embedding", "cls_token.weight"),
        ("positional_embedding_vlm", "pos_embed.weight"),
        ("layernorm_pre.", "first_norm."),
        ("layernorm_post.", "last_norm."),
        ("vision_adapter.mlp.fc", "merger.linear_fc"),
        ("model.layers.", "blocks."),
        (".input_layernorm.", ".norm1."),
        (".post_attention_layernorm.", ".norm2."),
        (".self_attn.o_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
        (".mlp.fc", ".mlp.linear_fc"),
    ),
)
_TILES = ImageText(  # `_prompt_split_image` of transformers' processor
    written="<|image|>",
    token="<|patch|>",
    before="<|image_start|>",
    column_end="<|tile_x_separator|>",
    row_end="<|tile_y_separator|>",
    whole="<|tile_y_separator|><|image|>",
    alone="<|image|>",
    after="<|image_end|>",
)
_MERGE = 2


def read_llama4_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Llama 4."""
    sizes = read_sizes(vision, text)
    inner, out = vision.positive("projector_input_dim", 4096), vision.positive("projector_output_dim", 4096)
    vision.only(
        hidden_act="gelu",
        pixel_shuffle_ratio=1 / _MERGE,
        projector_input_dim=out,
        vision_output_dim=out,
        multi_modal_projector_bias=False,
        vision_feature_select_strategy="default",
    )
    if sizes["intermediate_size"] != (merged := sizes["hidden_size"] * _MERGE**2):
        raise vision.error("intermediate_size", f"is not {merged:,}, the size of the patches of a token")
    return VisionConfig(
        names=_NAMES,
        processor="llama4",
        has_flat_patches=True,
        merger=MergerConfig(
            kind="squares", size=inner, result_size=out, activates_result=True, has_norm=False, has_bias=False
        ),
        eps=1e-5,
        activation="gelu",
        has_patch_bias=False,
        has_first_norm=True,
        norms_positions=True,
        has_last_norm=True,
        has_class_token=True,
        has_flat_class_token=True,
        has_last_class_position=True,
        rope="columns",
        has_paired_rows=True,
        rope_theta=rope_theta(vision),
        first_place=1,
        image_token_id=image_token(config, 200_092),
        text=_TILES,
        **read_tiles(vision, sizes["patch_size"], _MERGE, default=448),
        **sizes,
    )
