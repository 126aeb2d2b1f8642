"""The towers of GOT-OCR 2 and DeepSeek-OCR 2 (SAM, https://arxiv.org/abs/2304.02643), as config.json spells them.
Torch-free.

Scores depend on learned distances, in most layers within windows. Three convolutions make a token of 16 patches. In
DeepSeek-OCR 2 (https://arxiv.org/abs/2601.20552) learned queries then read these tokens in layers of their own; images
are read in tiles and as a whole, which is larger than they are.
"""

from __future__ import annotations

from typing import Any

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, QueryEncoderConfig, VisionConfig
from nvcli.models.vision.vision_file import image_token, layer_list, read_sizes, read_tiles, rope_theta

_RENAMED = (
    ("pos_embed", "pos_embed.weight"),
    (".attn.rel_pos_h", ".attn.row_distances.weight"),
    (".attn.rel_pos_w", ".attn.distances.weight"),
    (".mlp.lin", ".mlp.linear_fc"),
)
_GOT = TowerNames(
    prefixes=(
        ("vision_tower.neck.", f"{TOWER}.merger."),
        ("vision_tower.", f"{TOWER}."),
        ("multi_modal_projector.", f"{TOWER}.merger."),
    ),
    renamed=(
        *_RENAMED,
        ("patch_embed.projection.", "patch_embed.proj."),
        (".layer_norm1.", ".norm1."),
        (".layer_norm2.", ".norm2."),
        ("layers.", "blocks."),
        ("conv1.", "neck1."),
        ("conv2.", "neck2."),
        ("layer_norm", "neck_norm"),
        ("conv_upsampler", "downsampler"),
        ("multimodal_projector.", "projection."),
    ),
)
_DEEPSEEK = TowerNames(
    prefixes=(
        ("sam_model.neck.0.", f"{TOWER}.merger.neck1."),
        ("sam_model.neck.1.", f"{TOWER}.merger.neck_norm1."),
        ("sam_model.neck.2.", f"{TOWER}.merger.neck2."),
        ("sam_model.neck.3.", f"{TOWER}.merger.neck_norm2."),
        ("sam_model.net_2.", f"{TOWER}.merger.downsampler1."),
        ("sam_model.net_3.", f"{TOWER}.merger.downsampler2."),
        ("sam_model.", f"{TOWER}."),
        ("qwen2_model.model.model.layers.", f"{TOWER}.encoder."),
        ("qwen2_model.model.model.", f"{TOWER}.encoder."),
        ("qwen2_model.query_768.", f"{TOWER}.encoder.queries0."),
        ("qwen2_model.query_1024.", f"{TOWER}.encoder.queries1."),
        ("projector.layers.", f"{TOWER}.encoder.projection."),
        ("view_seperator", f"{TOWER}.separator.weight"),
    ),
    renamed=(
        *_RENAMED,
        (".input_layernorm.", ".norm1."),
        (".post_attention_layernorm.", ".norm2."),
        (".self_attn.o_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
    ),
)
_MERGE = 4
_QUERY_SIDES = (12, 16)
"""The sides in tokens of a tile and of a whole image, for which DeepSeek-OCR 2 has queries."""


def read_got_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GOT-OCR 2. Its files leave out so much that any file of another model would fit."""
    config.only(model_type="got_ocr2")
    sam = _read(vision, text)
    tiles = read_tiles(vision, sam["patch_size"], _MERGE, default=1024)
    return VisionConfig(
        names=_GOT,
        processor="got_ocr",
        merger=MergerConfig(kind="convolved", size=sam["out_size"], neck_size=_neck(vision)),
        interpolation="borders",
        image_token_id=image_token(config, 151_859),
        **tiles,
        **sam,
    )


def read_deepseek_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of DeepSeek-OCR 2."""
    sam, encoder = vision.object("sam_config"), vision.object("encoder_config")
    fields, neck, size = _read(sam, text), _neck(sam), encoder.positive("hidden_size")
    if (found := sam.values.get("downsample_channels")) is not None and found != [2 * neck, size]:
        raise sam.error("downsample_channels", f"is not {[2 * neck, size]}, as other keys say")
    encoder.only(hidden_act="silu", use_sliding_window=False)
    heads = encoder.positive("num_attention_heads")
    kv_heads = encoder.positive("num_key_value_heads", heads)
    if heads % kv_heads or size % (2 * heads):
        raise encoder.error("num_attention_heads", f"{heads} does not fit {kv_heads} key heads and a size of {size}")
    tiles = read_tiles(sam, fields["patch_size"], _MERGE, default=1024)
    if tiles["tile_tokens"] != _QUERY_SIDES[1]:
        raise sam.error("image_size", f"has {tiles['tile_tokens']} tokens of a side; supported: {_QUERY_SIDES[1]}")
    return VisionConfig(
        names=_DEEPSEEK,
        processor="deepseek_ocr2",
        merge_size=_MERGE,
        merger=MergerConfig(kind="convolved", size=size, neck_size=neck),
        num_positions=tiles["num_positions"],
        interpolation="resampled",
        encoder=QueryEncoderConfig(
            hidden_size=size,
            depth=encoder.positive("num_hidden_layers"),
            intermediate_size=encoder.positive("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            eps=encoder.positive_number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta(encoder),
            sides=_QUERY_SIDES,
        ),
        image_token_id=config.get("image_token_id", int, 128_815),
        text=ImageText(written="<image>", token="<image>", has_parts=True),
        **fields,
    )


def _neck(sam: JsonFile) -> int:
    return sam.positive("output_channels", 256)


def _read(sam: JsonFile, text: JsonFile) -> dict[str, Any]:
    """Read what these towers have in common."""
    sam.only(hidden_act="gelu", use_abs_pos=True, use_rel_pos=True)
    hidden = sam.positive("hidden_size", 768)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": sam.positive("mlp_dim", 4 * hidden),
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
    }
    return {
        **read_sizes(sam.with_defaults(sizes), text),
        "eps": sam.positive_number("layer_norm_eps", 1e-6),
        "activation": "gelu",
        "qkv_bias": sam.get("qkv_bias", bool, True),
        "distance_window": sam.positive("window_size", 14),
        "full_layers": layer_list(
            sam.with_defaults(sizes), "global_attn_indexes", (2, 5, 8, 11), depth="num_hidden_layers"
        ),
        "has_square_table": True,
    }
