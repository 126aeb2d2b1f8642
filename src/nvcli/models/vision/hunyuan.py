"""The towers of HunyuanOCR (https://arxiv.org/abs/2511.19575) and Hunyuan V4, as config.json spells them. Torch-free.

Learned vectors stand after the rows of an image's tokens, and HunyuanOCR's also before and behind all of them. The
latter is held to the code that was published with the weights where transformers 5.17 and later differ: they turn the
halves of a head by different axes, and do not enlarge the grid to which positions are interpolated.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_axes, read_sizes

_NAMES = TowerNames(
    prefixes=(("vit.", f"{TOWER}."),),
    renamed=(
        ("embeddings.patch_embedding.", "patch_embed.proj."),
        ("embeddings.position_embedding.", "pos_embed."),
        (".input_layernorm.", ".norm1."),
        (".post_attention_layernorm.", ".norm2."),
        ("layers.", "blocks."),
        (".self_attn.o_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
        (".dense_h_to_4h.", ".linear_fc1."),
        (".dense_4h_to_h.", ".linear_fc2."),
        ("perceive.", "merger."),
        (".proj.0.", ".merging_layer."),
        (".proj.2.", ".linear_fc1."),
        ("merger.mlp.", "merger.linear_fc2."),
        ("before_rms.", "norm."),
        ("after_rms.", "last_norm."),
        ("image_begin", "begin.weight"),
        ("image_newline", "newline.weight"),
        ("image_end", "end.weight"),
    ),
    left=(f"{TOWER}.merger.image_sep",),
)
_PLACE, _HEIGHT, _WIDTH, _IMAGE = range(4)


def read_hunyuan_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of HunyuanOCR."""
    axes = read_axes(text, (16, 16, 16, 16), order=(_PLACE, _WIDTH, _HEIGHT, _IMAGE))
    tower = _read(config, vision, text, axes)
    vision.only(temporal_patch_size=1)
    merger = replace(tower.merger, kind="bordered", size=4 * tower.hidden_size)
    return replace(tower, merger=merger, numbers_images=True)


def read_hunyuan_v4_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Hunyuan V4 with vision."""
    return _read(config, vision, text, read_axes(text, (12, 10, 10), is_interleaved=True))


def _read(config: JsonFile, vision: JsonFile, text: JsonFile, axes: tuple[int, ...]) -> VisionConfig:
    sizes, eps = read_sizes(vision, text), vision.positive_number("rms_norm_eps", 1e-5)
    vision.only(hidden_act="gelu", interpolate_mode="bilinear", num_key_value_heads=sizes["num_heads"])
    return VisionConfig(
        names=_NAMES,
        processor="hunyuan_vl",
        merge_size=vision.positive("spatial_merge_size", 2),
        merger=MergerConfig(kind="ended", size=0, norm="rms", eps=eps),
        eps=eps,
        activation="gelu",
        num_positions=(vision.positive("max_image_size", 2048) // sizes["patch_size"]) ** 2,
        has_unused_position=True,
        interpolation="enlarged",
        axes=axes,
        image_token_id=config.get("image_token_id", int, 120_120),
        **sizes,
    )
