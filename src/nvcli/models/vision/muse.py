"""The tower of Muse Glimmer (Perception Encoder, https://arxiv.org/abs/2504.13181), as config.json spells it.
Torch-free.

Most of its layers attend within windows. The decoder norms the embeddings of images as it does those of text.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import layer_kinds, read_sizes, rope_theta

_WINDOW, _FULL = "window_attention", "full_attention"
_NAMES = TowerNames(
    prefixes=(
        ("vision_tower.", f"{TOWER}."),
        ("vision_adapter.", f"{TOWER}.merger."),
        ("vision_projection.", f"{TOWER}.merger.projector."),
    ),
    renamed=(
        ("patch_embedder.patch_embedding.", "patch_embed.proj."),
        ("patch_embedder.position_embedding_table.", "pos_embed."),
        ("ln_pre.", "first_norm."),
        ("ln_post.", "last_norm."),
        ("layers.", "blocks."),
        ("fc1.", "linear_fc1."),
        ("fc2.", "linear_fc2."),
    ),
)
_TEXT = ImageText(written="<|patch|>", token="<|patch|>", before="<|image_start|>", after="<|image_end|>")


def read_muse_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Muse Glimmer."""
    sizes, merge, side = (
        read_sizes(vision, text),
        vision.positive("merge_size", 2),
        vision.positive("pos_emb_height", 32),
    )
    depth = sizes["depth"]
    vision.only(hidden_act="gelu", pos_emb_width=side, layer_norm_eps=1e-5)
    config.only(projector_hidden_act="gelu", out_hidden_size=sizes["hidden_size"] * merge**2)
    if side % merge:
        raise vision.error("pos_emb_height", f"{side} patches, the side of a window, are no whole tokens of {merge}")
    default = [_WINDOW if number % 4 and number < depth else _FULL for number in range(1, depth + 1)]
    kinds = layer_kinds(vision, (_WINDOW, _FULL), default)
    inner = config.positive("projector_hidden_size", 4096)
    return VisionConfig(
        names=_NAMES,
        processor="muse_glimmer",
        temporal_patch_size=vision.positive("patch_temporal", 2),
        has_first_frames=True,
        has_flat_patches=True,
        merge_size=merge,
        merger=MergerConfig(
            kind="squares",
            size=inner,
            result_size=inner,
            activates_result=True,
            by_channel=True,
            has_norm=False,
            has_bias=False,
        ),
        eps=1e-5,
        activation="gelu",
        has_patch_bias=False,
        has_first_norm=True,
        norms_positions=True,
        has_last_norm=True,
        rope="columns",
        rope_theta=rope_theta(vision),
        first_place=1,
        window_tokens=side // merge,
        full_layers=tuple(number for number, kind in enumerate(kinds) if kind == _FULL),
        num_positions=side**2,
        interpolation="faded",
        image_token_id=config.get("image_token_id", int, 200_092),
        text=_TEXT,
        **sizes,
    )
