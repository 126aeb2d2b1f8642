"""The tower of MiniMax-M3 (https://huggingface.co/MiniMaxAI/MiniMax-M3), as config.json spells it. Torch-free."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import MLP_NAMES, image_token, read_sizes, rope_theta

_NAMES = TowerNames(
    prefixes=(
        ("vision_tower.vision_model.", f"{TOWER}."),
        ("multi_modal_projector.", f"{TOWER}.merger.patch_"),
        ("patch_merge_mlp.", f"{TOWER}.merger."),
    ),
    renamed=(
        ("embeddings.patch_embedding.", "patch_embed.proj."),
        ("pre_layrnorm.", "first_norm."),
        ("encoder.layers.", "blocks."),
        (".layer_norm", ".norm"),
        (".self_attn.out_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
        (".mlp.fc", ".mlp.linear_fc"),
        *MLP_NAMES,
    ),
)
_TEXT = ImageText(written="]<]image[>[", token="]<]image[>[", before="]<]start of image[>[", after="]<]end of image[>[")


def read_minimax_m3_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower."""
    vision.only(hidden_act="gelu")
    sizes = read_sizes(vision, text)
    merger = MergerConfig(
        kind="squares",
        size=config.positive("projector_hidden_size", sizes["out_size"]),
        patch_result_size=sizes["out_size"],
        has_norm=False,
    )
    return VisionConfig(
        names=_NAMES,
        processor="minimax_m3",
        temporal_patch_size=vision.positive("temporal_patch_size", 2),
        merge_size=vision.positive("spatial_merge_size", 2),
        merger=merger,
        eps=vision.positive_number("layer_norm_eps", 1e-5),
        activation="gelu",
        has_patch_bias=False,
        has_first_norm=True,
        rope="thirds",
        rope_theta=rope_theta(vision),
        image_token_id=image_token(config, 200_025),
        text=_TEXT,
        **sizes,
    )
