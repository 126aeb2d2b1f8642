"""The tower of Ovis 2 (AIMv2, https://arxiv.org/abs/2411.14402), as config.json spells it. Torch-free.

Images are cut into tiles, each of which the tower sees by itself. A token is the mean of a table's vectors, by weights
that the tower gives; other vectors of the table stand around and between the tokens of tiles.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import NUM_MARKS, TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_sizes, read_tiles

_NAMES = TowerNames(
    prefixes=(
        ("vision_tower.transformer.rms_norm.", f"{TOWER}.last_norm."),
        ("vision_tower.transformer.", f"{TOWER}."),
        ("vision_tower.head_linear.", f"{TOWER}.merger.projection."),
        ("vision_tower.head_norm.", f"{TOWER}.merger.norm."),
        ("visual_embeddings_table.", f"{TOWER}.merger.table."),
    ),
    renamed=(
        ("embeddings.patch_embedding.", "patch_embed.proj."),
        ("embeddings.position_embedding.", "pos_embed."),
        ("embeddings.rms_norm.", "first_norm."),
        ("encoder.layers.", "blocks."),
        (".rms_norm1.", ".norm1."),
        (".rms_norm2.", ".norm2."),
        (".attention.out_proj.", ".attn.proj."),
        (".attention.", ".attn."),
        (".ffn.", ".mlp."),
    ),
)
_TEXT = ImageText(written="<image>", token="<IMG_ATOM>")


def read_ovis_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Ovis 2."""
    vision.only(hidden_act="silu", tokenize_function="softmax", num_visual_indicator_tokens=NUM_MARKS)
    sizes, bias = read_sizes(vision, text), vision.get("qkv_bias", bool, False)
    stride = vision.positive("hidden_stride", 1)
    table = vision.positive("vocab_size", 16_384, least=NUM_MARKS + 1)
    return VisionConfig(
        names=_NAMES,
        processor="ovis2",
        merger=MergerConfig(kind="table", size=table - NUM_MARKS, has_bias=False, eps=1e-5),
        norm="rms",
        eps=vision.positive_number("rms_norm_eps", 1e-5),
        activation="silu",
        is_gated=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=vision.get("mlp_bias", bool, False),
        has_first_norm=True,
        has_last_norm=True,
        image_token_id=config.get("image_token_id", int, 151_665),
        text=_TEXT,
        **read_tiles(vision, sizes["patch_size"], stride, default=224),
        **sizes,
    )
